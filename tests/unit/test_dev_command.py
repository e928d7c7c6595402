"""What `kvlease dev` refuses before it starts anything, and what is left of a start that fails."""

import asyncio
import gc
import json
import shutil
import signal
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from kvlease import cli
from kvlease.dev import main as dev
from kvlease.dev import stack as dev_stack
from kvlease.dev.completion import TURN_TIMEOUT_S
from kvlease.dev.engine_env import EngineEnvironmentError
from kvlease.dev.engine_process import EngineProcessError
from kvlease.dev.refusal import why_taken
from kvlease.dev.stack import EngineSeat


def test_a_port_that_is_taken_is_a_wrong_use_and_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(dev, "_engine_maker", start)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["dev", "--engine", "sim", "--port", str(port)]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"kvlease dev: port {port} of the OpenAI API is taken; name another with --port\n"
    assert printed.out == ""


def test_any_port_can_be_had() -> None:
    assert why_taken(0) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "/no/such/model"), "--model /no/such/model is no directory"),
        (("--device", "cuda", "--engine-python", "/no/python"), "/no/python cannot be run: No such file"),
        (("--device", "cuda", "--engine-python", sys.executable), f"{sys.executable} has no vLLM"),
    ],
)
def test_engines_that_cannot_start_are_a_wrong_use_and_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(dev, "_engine_maker", start)
    assert cli.main(["dev", "--port", "0", *flags]) == 2
    assert said in capsys.readouterr().err


class SlowEngine:
    """Never serves, and ends once a person was told that it is still starting."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, told: list[str], seat: EngineSeat) -> None:
        self._told = told
        self._log_file = seat.log_file

    async def start(self) -> None:
        self._log_file.write_text("what the engine said\n")

    async def wait_ready(self) -> float:
        while not any("still starting" in line for line in self._told):
            await asyncio.sleep(0.005)
        raise EngineProcessError("the engine ended")

    async def stop(self) -> None:
        """It has ended by itself."""


def test_a_check_that_fails_says_so_in_json_and_keeps_the_engines_logs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "configure_logging", lambda *_: None)
    told: list[str] = []
    monkeypatch.setattr(dev, "_progress_to", lambda _: told.append)
    monkeypatch.setattr(dev, "_engine_maker", lambda *_: partial(SlowEngine, told))
    monkeypatch.setattr(dev_stack, "STILL_STARTING_S", 0.01)
    assert cli.main(["dev", "--store", "memory", "--check", "--output", "json"]) == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["ok"], document["turns"]) == (False, [])
    assert (document["error"]["kind"], document["error"]["message"]) == (
        "EngineProcessError",
        "the engine ended",
    )
    logs = Path(document["logs"])
    try:
        assert {file.name for file in logs.iterdir()} == {"prefill-0.log", "decode-1.log"}
        assert f"engines are still starting; their logs are in {logs}" in told
        assert f"kvlease dev: the engines' logs are kept in {logs}" in printed.err
    finally:
        shutil.rmtree(logs)


def test_a_check_without_vllm_says_so_in_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_: object) -> Path:
        raise EngineEnvironmentError("no network")

    monkeypatch.setattr(dev, "configure_logging", lambda *_: None)
    monkeypatch.setattr(dev, "ensure_engine_environment", absent)
    assert cli.main(["dev", "--check", "--output", "json"]) == 1
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert error["kind"] == "EngineEnvironmentError"
    assert "no network" in error["message"]
    assert "kvlease dev --engine sim" in printed.err


def test_an_interrupted_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def interrupt(line: str) -> None:
        if "still starting" in line:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(dev, "configure_logging", lambda *_: None)
    monkeypatch.setattr(dev, "_engine_maker", lambda *_: partial(SlowEngine, []))
    monkeypatch.setattr(dev, "_progress_to", lambda _: interrupt)
    monkeypatch.setattr(dev_stack, "STILL_STARTING_S", 0.01)
    assert cli.main(["dev", "--store", "memory", "--check"]) == dev.EXIT_INTERRUPTED
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_cpu_engine_that_is_slow_has_not_stalled() -> None:
    dev.PATIENT.validate()
    assert dev.PATIENT.stall_s < TURN_TIMEOUT_S


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--port", "65536", "is not a port between 0 and 65535"),
        ("--port", "http", "is not a port between 0 and 65535"),
        ("--decode", "0", "is not between 1 and 16 engines of a role"),
    ],
)
def test_numbers_that_make_no_sense_are_told_with_what_does(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, said: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["dev", flag, value])
    assert refused.value.code == 2
    assert said in capsys.readouterr().err
