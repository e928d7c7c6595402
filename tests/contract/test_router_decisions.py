"""A turn's decision can be read where the turn was served, by its tenant alone."""

import asyncio

import pytest

from kvlease import cli
from kvlease.core.decisions import Decision
from stubs.engines import StubEngine
from stubs.router import FIRST, Stack


async def test_a_turns_decision_can_be_read_and_made_again(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.chat(FIRST, conversation_id="c")
    path = f"/v1/kvlease/decisions/{answer.headers['X-Request-Id']}"
    read = await stack.send("GET", path)
    assert read.status == 200
    decision = Decision.from_json(read.json)
    assert decision.plan is not None
    assert f"{decision.plan.path.value}; {decision.plan.reason.value}" == answer.route
    assert decision.again() == decision.plan
    other = await stack.send("GET", path, headers={"Authorization": "Bearer other"})
    assert other.status == 404


@pytest.mark.parametrize("turn_id", ["none", "%20"])
async def test_a_turn_that_never_was_has_no_decision(stack: Stack, turn_id: str) -> None:
    answer = await stack.send("GET", f"/v1/kvlease/decisions/{turn_id}")
    assert answer.status == 404


async def test_explain_asks_a_router_and_tells_what_it_does_not_know_from_what_is_no_router(
    stack: Stack, prefill: StubEngine, decode: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    async def explain(url: str, turn: str) -> int:
        return await asyncio.to_thread(cli.main, ["explain", "--router", url, "--turn", turn])

    answer = await stack.chat(FIRST)
    turn = answer.headers["X-Request-Id"]
    assert await explain(stack.router.url, turn) == 0
    assert f"turn {turn}" in capsys.readouterr().out
    assert await explain(stack.router.url, "a turn/that never was") == 1
    assert "has no decision of turn" in capsys.readouterr().err
    assert await explain(decode.engine.url, turn) == 1
    assert "not as a router does" in capsys.readouterr().err
