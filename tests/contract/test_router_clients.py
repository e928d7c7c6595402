"""The official Python clients of OpenAI and Anthropic, unmodified, against a router."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from stubs.answers import Counts, message_stream, response_stream
from stubs.engines import MODEL, Received, StubEngine, event, send_chunks
from stubs.router import LONG, Stack

TEXT = "tell me something about lighthouses " * 8
COUNTS = Counts(200, 5, 64)


@pytest.fixture
async def openai_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(api_key="sk-x", base_url=stack.router.url + "/v1", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(stack: Stack) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        api_key="sk-ant-x", base_url=stack.router.url, max_retries=0
    ) as client:
        yield client


def breaks(sent: bytes) -> Any:
    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [sent[: len(sent) // 2]], close=True)

    return answer


# --- OpenAI --------------------------------------------------------------------------------------------------------


async def test_openai_chat_whole_and_streamed(
    openai_client: openai.AsyncOpenAI, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    raw = await openai_client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
    assert raw.headers["X-Kvlease-Route"] == "recompute; first_turn"
    said = raw.parse().choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": LONG}]
    stream = await openai_client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    assert stream.response.headers["X-Kvlease-Route"] == "readback; long_suffix"
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 200


async def test_openai_tools_called_and_answered(
    openai_client: openai.AsyncOpenAI, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    pieces: list[Any] = [
        {"role": "assistant", "content": None},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
        choices = [{"index": 0, "delta": piece, "finish_reason": None} for piece in pieces]
        choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
        sent = [event({**head, "choices": [choice]}) for choice in choices]
        return await send_chunks(request, [*sent, b"data: [DONE]\n\n"])

    decode.script = answer
    messages: Any = [{"role": "user", "content": TEXT}]
    tools: Any = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object"}}}
    ]
    async with openai_client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        said = (await stream.get_final_completion()).choices[0].message
    decode.script = None
    assert said.tool_calls is not None
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "done"}
    messages += [said.model_dump(exclude_none=True), result]
    raw = await openai_client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, tools=tools
    )
    assert raw.headers["X-Kvlease-Route"] == "append; short_suffix"


async def test_openai_responses_go_on_from_a_previous_one(
    openai_client: openai.AsyncOpenAI, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await openai_client.responses.create(model=MODEL, input=TEXT)
    assert first.output_text == "hello"
    async with openai_client.responses.stream(
        model=MODEL, input=LONG, previous_response_id=first.id
    ) as stream:
        kinds = [one.type async for one in stream]
        second = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert second.previous_response_id == first.id
    assert (await openai_client.responses.retrieve(first.id)).output_text == "hello"
    await openai_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert missing.value.code == "previous_response_not_found"


async def test_openai_completions_embeddings_and_models(
    openai_client: openai.AsyncOpenAI, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    completion = await openai_client.completions.create(model=MODEL, prompt=TEXT, n=1)
    assert completion.choices[0].text == "hello"
    assert [model.id async for model in await openai_client.models.list()] == [MODEL]
    assert (await openai_client.models.retrieve(MODEL)).id == MODEL

    async def embed(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(
            {"object": "list", "model": MODEL, "data": [{"index": 0, "embedding": [0.5]}]}
        )

    prefill.script = decode.script = embed
    embedded = await openai_client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    assert embedded.data[0].embedding == [0.5]


async def test_openai_errors_are_the_clients_own(
    openai_client: openai.AsyncOpenAI, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.responses.create(model=MODEL, input="x", background=True)
    assert refused.value.code == "invalid_request"
    decode.script = breaks(response_stream("hello", COUNTS))
    with pytest.raises(openai.APIError):
        async for _ in await openai_client.responses.create(model=MODEL, input=TEXT, stream=True):
            pass
    await decode.stop()
    with pytest.raises(openai.InternalServerError) as down:
        await openai_client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TEXT}])
    assert (down.value.status_code, down.value.code) == (503, "unavailable")


# --- Anthropic -----------------------------------------------------------------------------------------------------


async def test_anthropic_messages_whole_and_streamed(
    anthropic_client: anthropic.AsyncAnthropic, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    decode.cached_tokens = 64
    prefill.report = replace(prefill.report, read_tokens=64)
    messages: Any = [{"role": "user", "content": TEXT}]
    first = await anthropic_client.messages.create(model=MODEL, max_tokens=50, messages=messages)
    block: Any = first.content[0]
    assert block.text == "hello"
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": LONG}]
    async with anthropic_client.messages.stream(model=MODEL, max_tokens=50, messages=messages) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        last = await stream.get_final_message()
        headers = stream.response.headers
    assert text == "hello"
    assert (last.usage.input_tokens, last.usage.cache_read_input_tokens) == (136, 64)
    assert headers["X-Kvlease-Route"] == "readback; long_suffix"


async def test_anthropic_counts_tokens(
    anthropic_client: anthropic.AsyncAnthropic, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def count(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response({"input_tokens": 17})

    prefill.script = decode.script = count
    messages: Any = [{"role": "user", "content": TEXT}]
    counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == 17


async def test_anthropic_errors_are_the_clients_own(
    anthropic_client: anthropic.AsyncAnthropic, stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    messages: Any = [{"role": "user", "content": TEXT}]
    decode.script = breaks(message_stream("hello", COUNTS))
    with pytest.raises(anthropic.APIStatusError) as broken:
        async for _ in await anthropic_client.messages.create(
            model=MODEL, max_tokens=5, messages=messages, stream=True
        ):
            pass
    assert "broke off" in str(broken.value)
    await decode.stop()
    with pytest.raises(anthropic.APIStatusError) as down:
        await anthropic_client.messages.create(model=MODEL, max_tokens=5, messages=messages)
    assert down.value.status_code == 503
    assert down.value.request_id
