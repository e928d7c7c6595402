"""Once every rate has been measured, predicted times choose the path."""

from typing import Any

import pytest

from kvlease.core.decisions import Decision
from kvlease.core.turn import TurnReport
from stubs.engines import StubEngine
from stubs.router import FIRST, LONG, Stack, said


@pytest.fixture
def router_settings() -> dict[str, Any]:
    return {"rate_samples_min": 1}


async def test_streamed_turns_teach_every_rate_and_then_predicted_times_decide(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    prefill.report = TurnReport(200, 0, 100, 100, "read", kept_tokens=200, read_s=0.01)
    routes: list[str] = []
    messages = FIRST
    for text in ("more", LONG, "more"):
        answer = await stack.chat(messages, conversation_id="c", stream=True)
        routes.append(answer.route)
        messages = said(messages, "hello", text)
    assert routes == ["recompute; first_turn", "append; short_suffix", "readback; long_suffix"]
    last = await stack.chat(messages, conversation_id="c", stream=True)
    assert last.route.split("; ")[1] in ("fastest", "steady")
    read = await stack.send("GET", f"/v1/kvlease/decisions/{last.headers['X-Request-Id']}")
    plan = Decision.from_json(read.json).plan
    assert plan is not None
    assert len(plan.prices) == 3
