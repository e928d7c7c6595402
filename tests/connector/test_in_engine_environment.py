"""Runs the tests that import vLLM, but start no engine, with the engine environment's Python.

pytest comes from this environment and is put behind everything that the engine environment has of its own.
"""

import os
import subprocess
from pathlib import Path
from sysconfig import get_path

import pytest

from kvlease.dev.engine_env import ensure_engine_environment

ROOT = Path(__file__).parents[2]
TESTS = "tests/connector/in_engine_env"
RUN_PYTEST = (
    "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_the_connector_works_with_the_classes_of_real_vllm() -> None:
    python = ensure_engine_environment()
    done = subprocess.run(
        [
            python,
            "-c",
            RUN_PYTEST,
            get_path("purelib"),
            "-q",
            "--import-mode=importlib",
            f"--rootdir={ROOT}",
            "-c",
            os.devnull,
            "-p",
            "no:cacheprovider",
            ROOT / TESTS,
        ],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("services", "connector", TESTS)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1100,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
