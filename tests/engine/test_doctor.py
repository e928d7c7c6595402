"""`kvlease doctor` and `kvlease engines` look at real engines."""

import asyncio
import json
import sys
from typing import Any

import pytest
from tests.engine.pair import Pair, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def kvlease(*arguments: str) -> tuple[int, Any, str]:
    """Exit status, JSON document and standard error of one command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvlease.cli", *arguments, "--output", "json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(output or b"null"), errors.decode()


async def until_well(*arguments: str) -> Any:
    """What a command prints once it finds no problem: an engine that has just started may be slow to answer."""
    seen: list[Any] = []

    async def is_well() -> bool:
        status, document, errors = await kvlease(*arguments)
        seen[:] = [errors, document]
        return status == 0

    try:
        await eventually(is_well, f"{arguments[0]} finds no problem")
    except AssertionError:
        raise AssertionError(seen) from None
    return seen[1]


async def test_a_healthy_pair_has_no_problem_and_its_facts_are_told(pair: Pair) -> None:
    assert pair.stack.registry is not None
    registry = ("--registry", pair.stack.registry.address)
    engines = await until_well("engines", *registry)
    assert {engine["role"] for engine in engines} == {"prefill", "decode"}
    findings = await until_well("doctor", *registry)
    facts = {finding["check"]: finding["text"] for finding in findings}
    assert facts["versions"].startswith("every engine runs vLLM 0.")
    assert facts["nixl_backend"] == "NIXL uses UCX"
    assert facts["side_channel"].endswith("takes connections")
