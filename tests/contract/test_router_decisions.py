"""A turn's decision can be read where the turn was served, by its tenant alone."""

import pytest

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
