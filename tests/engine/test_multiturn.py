"""`kvlease bench multiturn` on real engines: every mode takes its path, and stock's engines really READ."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvlease.dev.engine_process import BLOCK_TOKENS

TIMEOUT_S = 900


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    command = [sys.executable, "-m", "kvlease.cli", "bench", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)


def talk(name: str) -> dict[str, Any]:
    """A conversation of two turns, as vLLM's multi-turn benchmark reads it."""
    said = [("user", f"{name}: " + "What is a lease? " * 40), ("assistant", "It ends. " * 12)] * 2
    return {"id": name, "messages": [{"role": role, "content": content} for role, content in said]}


@pytest.mark.usefixtures("engines_lock")
def test_conversations_of_a_file_are_replayed(tmp_path: Path) -> None:
    conversations, record = tmp_path / "talks.json", tmp_path / "record.json"
    conversations.write_text(json.dumps([talk("a"), talk("b")]))
    ran = bench(
        *("multiturn", "--input", str(conversations), "--modes", "on,append"),
        *("--repeats", "1", "--output", str(record)),
    )
    assert ran.returncode == 0, ran.stderr
    turns = json.loads(record.read_text())["turns"]
    paths = {(turn["mode"], turn["turn"]): turn["path"] for turn in turns}
    assert paths == {
        ("on", 1): "recompute",
        ("on", 2): "readback",
        ("append", 1): "recompute",
        ("append", 2): "append",
    }
    assert Counter(turn["mode"] for turn in turns) == {"on": 4, "append": 4}
    assert all((turn["reused_tokens"] > 0) == (turn["turn"] > 1) for turn in turns)


@pytest.mark.usefixtures("engines_lock")
def test_every_mode_takes_its_path_and_a_second_run_goes_on_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    measured = ("--points", "1024+128", "--repeats", "1", "--output", str(record))
    ran = bench("multiturn", "--modes", "off,on,append,stock", *measured)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(record.read_text())
    paths = {turn["mode"]: turn["path"] for turn in document["turns"]}
    assert paths == {"off": "recompute", "on": "readback", "append": "append", "stock": "readback"}
    assert all((turn["prefill_ms"] > 0) == (turn["mode"] != "append") for turn in document["turns"])
    assert [turn["read_ms"] > 0 for turn in document["turns"] if turn["mode"] == "on"] == [True]
    moved = {turn["mode"]: turn["bytes"] for turn in document["turns"]}
    assert moved["on"] > moved["off"] >= 0 == moved["append"]
    back = {
        turn["mode"]: (turn["prefill_bytes"] > 0, turn["reused_tokens"] > 0) for turn in document["turns"]
    }
    assert back == {
        "off": (False, False),
        "on": (True, True),
        "append": (False, True),
        "stock": (True, True),
    }
    engines = [document["settings"][f"{kind} engines"]["decode"][0] for kind in ("kvlease", "stock")]
    assert engines[0] == engines[1]
    assert (engines[0]["block_size"], engines[0]["prefix_cache"]) == (BLOCK_TOKENS, True)
    left = bench("multiturn", "--modes", "off,on,append,auto,stock", *measured, "--resume", "--dry-run")
    assert left.stdout.split() == ["auto/1024+128x1#0"]
    again = bench("multiturn", *measured, "--dry-run")
    assert again.returncode == 1
    assert "--resume" in again.stderr
    same = bench("compare", str(record), str(record), "--output", "json")
    assert {row["ratio"] for row in json.loads(same.stdout)} == {1.0}
