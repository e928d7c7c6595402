"""Tests of the connector. Those that import vLLM run in the engine environment, through one test here."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") is not None else ["in_engine_env"]
