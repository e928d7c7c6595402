"""What `kvlease dev` refuses before it starts anything."""

import socket

import pytest

from kvlease import cli
from kvlease.dev import main as dev


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
    assert dev.why_taken(0) == ""


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
