"""The simulated engine's HTTP face: the shapes that routers and checks read, and bodies that are none."""

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import KvLocation, PinOutcome
from kvlease.core.turn import PARAMS_KEY, KeepOrder, TurnParams, TurnReport
from kvlease.runtime.clock import LoopClock
from kvlease.sim.engine import EngineSettings, SimEngine
from kvlease.sim.http import EngineApi
from kvlease.sim.side_channel import SideChannel

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 5}


class NobodyElse:
    """No other holder answers."""

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        return MissReason.UNREACHABLE

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        pass


@pytest.fixture
def engine() -> SimEngine:
    settings = EngineSettings(total_blocks=64)
    return SimEngine(
        settings, Holder("e", "b"), KvLocation("127.0.0.1", 1), LoopClock(), NobodyElse(), SideChannel(0.0)
    )


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(EngineApi(engine).app())) as client:
        yield client


async def test_a_stream_says_what_the_whole_answer_says(client: TestClient) -> None:
    body = {**CHAT, "logprobs": True, "return_token_ids": True}
    whole = await (await client.post("/v1/chat/completions", json=body)).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/chat/completions", json=streamed)
    assert response.headers["Content-Type"] == "text/event-stream"
    lines = [line[6:] for line in (await response.text()).splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    message = whole["choices"][0]["message"]["content"]
    assert "".join(choice["delta"]["content"] for choice in choices) == message
    assert [choice["token_ids"][0] for choice in choices] == whole["choices"][0]["token_ids"]
    logprobs = [choice["logprobs"]["content"][0] for choice in choices]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_the_report_of_a_turn_rides_in_the_whole_answer(client: TestClient, engine: SimEngine) -> None:
    keep = KeepOrder(7, LeaseKind.CONVERSATION, 6.0)
    params = {PARAMS_KEY: TurnParams("t", keep=keep).to_json()}
    response = await client.post("/v1/chat/completions", json={**CHAT, "kv_transfer_params": params})
    report = TurnReport.from_json((await response.json())["kv_transfer_params"][PARAMS_KEY])
    assert report.kept_tokens == 16 * (((await tokens(client)) + 4) // 16)
    assert engine.holder.table.get(7) is not None


async def tokens(client: TestClient) -> int:
    response = await client.post("/tokenize", json={"messages": CHAT["messages"]})
    return (await response.json())["count"]


async def test_two_choices_are_the_same_reply_and_grant_one_lease(
    client: TestClient, engine: SimEngine
) -> None:
    params = {PARAMS_KEY: TurnParams("t", keep=KeepOrder(7, LeaseKind.CONVERSATION, 6.0)).to_json()}
    body = {**CHAT, "n": 2, "kv_transfer_params": params}
    answer = await (await client.post("/v1/chat/completions", json=body)).json()
    first, second = answer["choices"]
    assert first["message"] == second["message"]
    assert len(engine.holder.table) == 1


async def test_a_stop_string_ends_the_reply(client: TestClient) -> None:
    reply = (await (await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 9})).json())[
        "choices"
    ]
    stop = reply[0]["text"][2:4]
    body = {"prompt": "abc", "max_tokens": 9, "stop": stop}
    choice = (await (await client.post("/v1/completions", json=body)).json())["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"].endswith(stop)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"messages": []}',
        b'{"messages": "text"}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": "2"}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 999999}',
        b"[" * 100_000,
    ],
)
async def test_a_body_that_is_no_request_is_answered_400(client: TestClient, body: bytes) -> None:
    response = await client.post("/v1/chat/completions", data=body)
    assert response.status == 400
    assert "message" in (await response.json())["error"]
    assert (await client.get("/health")).status == 200


@pytest.mark.parametrize(
    "params", [1, "x", [], {}, {"kvlease": None}, {"kvlease": {"version": 1, "tenant": "\ud800"}}]
)
async def test_parameters_that_are_no_orders_are_ignored(client: TestClient, params: object) -> None:
    data = json.dumps({**CHAT, "kv_transfer_params": params})
    response = await client.post("/v1/chat/completions", data=data)
    assert response.status == 200


async def test_metrics_models_and_reset_answer(client: TestClient) -> None:
    await client.post("/v1/chat/completions", json=CHAT)
    metrics = await (await client.get("/metrics")).text()
    assert "vllm:nixl_bytes_transferred_sum 0" in metrics.splitlines()
    assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == "sim"
    assert (await client.post("/reset_prefix_cache")).status == 200
