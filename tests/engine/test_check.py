"""`kvlease dev --check`: passes on the product, and fails on a product with a fault planted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("engines_lock")

REPOSITORY = Path(__file__).parents[2]
CHECK_TIMEOUT_S = 600.0
DOCUMENTED = {
    "path",
    "reason",
    "prompt_tokens",
    "reused_tokens",
    "read_bytes",
    "ttft_ms",
    "lease_id",
    "state",
    "equals_cold",
}


def check(*flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON document of one check."""
    command = [sys.executable, "-m", "kvlease.cli", "dev", "--check", "--output", "json", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False, cwd=REPOSITORY
    )
    assert done.stdout, f"no document, but on stderr:\n{done.stderr}"
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


def remove_logs(document: dict[str, Any]) -> None:
    """A check that fails keeps the engines' logs and names them."""
    logs = Path(document["logs"])
    assert {file.name for file in logs.iterdir()} == {"prefill-0.log", "decode-1.log"}
    shutil.rmtree(logs)


def planted(fault: str) -> tuple[str, ...]:
    """Flags that load a connector with a fault."""
    return (
        "--connector-module",
        f"tests.engine.planted.{fault}",
        "--connector-path",
        str(REPOSITORY),
    )


def test_the_check_passes_and_tells_all_that_is_documented() -> None:
    status, document = check()
    turns = document["turns"]
    assert (status, document["ok"]) == (0, True), document
    assert [turn["path"] for turn in turns] == ["recompute", "append", "readback", "readback"]
    assert all(turn.keys() >= DOCUMENTED for turn in turns)
    assert all(turn["equals_cold"] for turn in turns)
    assert turns[2]["reused_tokens"] > turns[1]["reused_tokens"] > turns[0]["reused_tokens"] == 0
    assert [turn["read_bytes"] > 0 for turn in turns] == [True, False, True, True]
    assert turns[3]["reason"] == "history_edited"


def test_the_check_fails_on_a_connector_that_does_not_verify() -> None:
    status, document = check(*planted("unverified"))
    assert (status, document["ok"]) == (1, False)
    remove_logs(document)
    *honest, edited = document["turns"]
    assert [turn["problem"] for turn in honest] == ["", "", ""]
    assert not edited["equals_cold"]
    assert "differs from the cold run" in edited["problem"]


def test_the_check_fails_when_a_retained_digest_is_wrong() -> None:
    status, document = check(*planted("wrong_digest"))
    assert (status, document["ok"]) == (1, False)
    remove_logs(document)
    turns = document["turns"]
    assert all(turn["equals_cold"] for turn in turns)
    short = turns[2]
    assert short["path"] == "readback"
    assert short["reused_tokens"] < short["expected_tokens"]
    assert short["problem"] == f"reused {short['reused_tokens']} of {short['expected_tokens']} shared tokens"
