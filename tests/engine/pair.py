"""A running system of one prefill and one decode engine, and what tests ask of it."""

import asyncio
import json
import os
import shlex
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from kvlease.core.conversation import tenant_digest
from kvlease.core.ids import lease_id_from_hex
from kvlease.core.records import EngineRole
from kvlease.dev.completion import Completion, bytes_read, complete, tokenize
from kvlease.dev.engine_env import ensure_engine_environment
from kvlease.dev.engine_process import BLOCK_TOKENS, Device, EngineProcess, EngineSpec
from kvlease.dev.engine_process import EngineRole as ProcessRole
from kvlease.dev.stack import EngineSeat, Stack, StackPlan
from kvlease.dev.tiny_model import ensure_tiny_model
from kvlease.router.config import RouterConfig
from kvlease.v1 import connector_pb2, registry_pb2, registry_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc

MODEL = "tiny-qwen3"
AWAIT_S = 120.0
PIN_WAIT_S = 15.0
"""Two engines that spin on two cores leave little to the sidecars: no pin is given up that would be answered."""
READ_PART_S = 45.0
"""Of it 0.4 is above `PIN_WAIT_S`: an answer that was waited for is never too old to be used."""
PROVISIONAL_S = 20.0
"""For the same reason no turn is given up that its router is about to confirm."""
REPOSITORY = Path(__file__).parents[2]
Message = dict[str, Any]


def needs_gpus(reason: str) -> pytest.MarkDecorator:
    """Leaves a module out where engines compute on CPUs."""
    on_gpus = os.environ.get("KVLEASE_TEST_DEVICE") == Device.CUDA.value
    return pytest.mark.skipif(not on_gpus, reason=f"needs GPUs: {reason}")


@dataclass(frozen=True)
class PairPlan:
    """How a pair differs from `kvlease dev`'s.

    Attributes:
        router: by default one in which thresholds decide the path of a turn, and not how long work has taken.
    """

    kvlease_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: Mapping[EngineRole, tuple[str, ...]] = field(default_factory=dict[EngineRole, tuple[str, ...]])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    connector_module: str = "kvlease_vllm.connector"
    router: RouterConfig = field(
        default_factory=partial(RouterConfig, rate_samples_min=0, provisional_s=PROVISIONAL_S)
    )
    stack: type[Stack] = Stack
    otlp_endpoint: str = ""
    model: Path | None = None
    """Model directory; None: the tiny model."""


@dataclass(slots=True)
class Outcome:
    """One turn: the reply, the router's record of it, the bytes that the engines READ meanwhile."""

    reply: Completion
    record: dict[str, Any]
    read_bytes: int
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """`append`, `readback` or `recompute`."""
        return str(self.record["path"])

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed again."""
        return int(self.record["reused_tokens"])


class Pair:
    """One prefill and one decode engine behind a router. `session` lives as long as the pair."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.session = session

    @staticmethod
    def make_stack(plan: PairPlan) -> Stack:
        """A stack of one prefill and one decode engine, not started.

        `KVLEASE_TEST_DEVICE=cuda` puts them on the GPUs that `KVLEASE_TEST_GPUS` names (default: `0,1`), with the vLLM
        of this interpreter and `KVLEASE_TEST_ENGINE_ARGUMENTS`.
        """
        device = Device(os.environ.get("KVLEASE_TEST_DEVICE", Device.CPU.value))
        python = Path(sys.executable) if device is Device.CUDA else ensure_engine_environment()
        device_arguments = shlex.split(os.environ.get("KVLEASE_TEST_ENGINE_ARGUMENTS", ""))
        gpus = [int(gpu) for gpu in os.environ.get("KVLEASE_TEST_GPUS", "0,1").split(",")]
        model = plan.model or ensure_tiny_model()

        def make(seat: EngineSeat) -> EngineProcess:
            return EngineProcess(
                EngineSpec(
                    role=ProcessRole(seat.role.value),
                    python=python,
                    model=model,
                    log_file=seat.log_file,
                    port=seat.port,
                    side_channel_port=seat.side_channel_port,
                    socket_dir=seat.socket_dir,
                    device=device,
                    gpu=gpus[seat.number],
                    served_model_name=MODEL,
                    kvlease_config={
                        "pin_wait_s": PIN_WAIT_S,
                        "read_part_s": READ_PART_S,
                        **plan.kvlease_config,
                    },
                    connector_module=plan.connector_module,
                    connector_path=REPOSITORY,
                    otlp_endpoint=plan.otlp_endpoint,
                    extra_arguments=(
                        "--enable-prompt-tokens-details",
                        *device_arguments,
                        *plan.arguments.get(seat.role, ()),
                    ),
                    environment={"VLLM_SERVER_DEV_MODE": "1", **plan.environment},
                )
            )

        return plan.stack(
            StackPlan(
                1,
                1,
                make,
                router=plan.router,
                otlp_endpoint=plan.otlp_endpoint,
                pin_call_s=PIN_WAIT_S / 2,
            ),
            progress=lambda _: None,
        )

    # --- turns ------------------------------------------------------------------------------------------------

    async def turn(
        self,
        messages: list[Message],
        conversation_id: str = "",
        *,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Outcome:
        """Sends one turn through the router and waits for its end. Streamed unless `stream=False`.

        Without an id the router finds the conversation by what was said, or begins one.
        """
        before = await self.bytes_read()
        named = {"conversation_id": conversation_id} if conversation_id else {}
        body = {**request_body(messages, **fields), **named}
        reply, response_headers = await complete(self.session, self.stack.router_url, body, headers)
        read = await self.bytes_read() - before
        conversation = await self.conversation(response_headers["X-Conversation-Id"], headers)
        return Outcome(reply, conversation["turns"][-1], read, response_headers)

    async def cold(self, messages: list[Message], **fields: Any) -> Completion:
        """The same prompt computed from nothing: without parameters, under a fresh salt."""
        body = {**request_body(messages, **fields), "cache_salt": uuid.uuid4().hex}
        reply, _ = await complete(self.session, self.url(EngineRole.DECODE), body)
        return reply

    async def text_turn(self, prompt: str | list[int], conversation_id: str, **fields: Any) -> Outcome:
        """Sends a plain prompt, text or token ids, as one turn: its length in tokens is exactly its own."""
        before = await self.bytes_read()
        body = {**text_body(prompt, **fields), "conversation_id": conversation_id}
        answer, headers = await self.post(f"{self.stack.router_url}/v1/completions", body)
        read = await self.bytes_read() - before
        conversation = await self.conversation(conversation_id)
        return Outcome(choices_of(answer)[0], conversation["turns"][-1], read, headers)

    async def text_cold(self, prompt: str | list[int], **fields: Any) -> Completion:
        """A plain prompt computed from nothing."""
        body = {**text_body(prompt, **fields), "cache_salt": uuid.uuid4().hex}
        answer, _ = await self.post(f"{self.url(EngineRole.DECODE)}/v1/completions", body)
        return choices_of(answer)[0]

    async def post(self, url: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
        """A JSON answer of status 200, with the response headers."""
        async with self.session.post(url, json=dict(body)) as response:
            text = await response.text()
            assert response.status == 200, f"{url} answered {response.status}: {text[:500]}"
            answer: dict[str, Any] = json.loads(text)
            return answer, response.headers.copy()

    async def release(self, conversation_id: str) -> None:
        """Ends a conversation's lease by name, as a client of the registry may."""
        lease = (await self.conversation(conversation_id))["lease"]
        assert self.stack.registry is not None
        async with grpc.aio.insecure_channel(self.stack.registry.address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            request = registry_pb2.ReleaseLeaseRequest(
                lease_id=lease_id_from_hex(lease["lease_id"]),
                engine_id=lease["engine_id"],
                tenant=tenant_digest("anonymous"),
            )

            async def is_released() -> bool:
                try:
                    await stub.ReleaseLease(request, timeout=30)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    return False  # the holder was too busy to answer
                return True

            await eventually(is_released, f"the lease of {conversation_id} is released")

    async def turns_counted(self, path: str, reason: str) -> int:
        """Turns that ended well by this path, as the router's metrics count them."""
        labels = f'kvlease_turns_total{{ended="well",path="{path}",reason="{reason}"}} '
        assert self.stack.router is not None
        async with self.session.get(f"{self.stack.router.admin_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(labels))

    async def prefix_hits(self) -> int:
        """Tokens that the engines found in their own prefix caches so far."""
        return int(sum([await self.metric(role, "vllm:prefix_cache_hits_total") for role in EngineRole]))

    async def conversation(
        self, conversation_id: str, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """What the router tells of a conversation."""
        url = f"{self.stack.router_url}/v1/kvlease/conversations/{conversation_id}"
        async with self.session.get(url, headers=headers) as response:
            response.raise_for_status()
            body: dict[str, Any] = await response.json()
            return body

    async def tokens(self, messages: list[Message]) -> list[int]:
        """The prompt as the engines tokenize it."""
        return await tokenize(self.session, self.url(EngineRole.DECODE), MODEL, messages)

    @asynccontextmanager
    async def another_router(self, settings: RouterConfig) -> AsyncGenerator[None, None]:
        """Turns go through another router, which knows no conversation, as long as the context lasts."""
        first, second = self.stack.router, await self.stack.start_router(settings)
        self.stack.router = second
        try:
            await eventually(self._is_routing, "the router knows the engines")
            yield
        finally:
            self.stack.router = first
            await second.stop()

    async def is_registered(self, role: EngineRole) -> bool:
        """Whether the router has an engine of a role."""
        async with self.session.get(f"{self.stack.router_url}/health") as response:
            engines: dict[str, int] = (await response.json())["engines"]
            return engines[role.value] == 1

    async def _is_routing(self) -> bool:
        async with self.session.get(f"{self.stack.router_url}/health") as response:
            return response.status == 200

    # --- engines ----------------------------------------------------------------------------------------------

    def url(self, role: EngineRole) -> str:
        """Base URL of the engine of a role."""
        return self.stack.engine_urls(role)[0]

    def engine(self, role: EngineRole) -> EngineProcess:
        """The engine process of a role."""
        for seat, engine in zip(self.stack.seats, self.stack.engines, strict=True):
            if seat.role is role and isinstance(engine, EngineProcess):
                return engine
        raise LookupError(role)

    async def bytes_read(self, *roles: EngineRole) -> int:
        """Bytes that the engines of these roles (default: both) have READ by NIXL so far."""
        urls = [self.url(role) for role in roles] if roles else self.stack.engine_urls()
        return await bytes_read(self.session, urls)

    async def gauges(self, role: EngineRole) -> connector_pb2.HolderGauges:
        """The holder's gauges and the connector's counters, asked through the sidecar."""
        place = next(number for number, seat in enumerate(self.stack.seats) if seat.role is role)
        engine_id = next(
            engine.holder.engine_id
            for engine in await self.stack.store.list_engines()
            if engine.url == self.url(role)
        )
        async with grpc.aio.insecure_channel(self.stack.sidecars[place].address) as channel:
            stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
            answer = await stub.ReadGauges(sidecar_pb2.ReadGaugesRequest(engine_id=engine_id), timeout=30)
            gauges: connector_pb2.HolderGauges = answer.gauges
            return gauges

    async def metric(self, role: EngineRole, name: str) -> float:
        """The sum of one of an engine's metrics over its labels."""
        async with self.session.get(f"{self.url(role)}/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = (line for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)

    async def is_idle(self, role: EngineRole) -> bool:
        """Whether no request runs or waits in an engine."""
        return not (
            await self.metric(role, "vllm:num_requests_running")
            + await self.metric(role, "vllm:num_requests_waiting")
        )

    async def is_at_base(self, role: EngineRole) -> bool:
        """Whether an engine has nothing to do and every block of it is free (the null block never is)."""
        await self.poke(role)
        gauges = await self.gauges(role)
        held = gauges.held_blocks + gauges.reading_blocks + gauges.quarantined_blocks
        return not held and gauges.free_blocks == gauges.total_blocks - 1 and await self.is_idle(role)

    async def settles(self, *roles: EngineRole) -> None:
        """Waits until nothing waits, and every block is back in the pool, in the engines of these roles."""
        for role in roles or tuple(EngineRole):

            async def at_base(role: EngineRole = role) -> bool:
                return await self.is_at_base(role)

            await eventually(at_base, f"every block of the {role.value} engine is free")

    async def reset_cache(self, role: EngineRole) -> None:
        """Clears an engine's prefix cache, and with it every lease.

        Waits for blocks that are still on their way to a reader, for which vLLM refuses to clear anything.
        """

        async def is_cleared() -> bool:
            async with self.session.post(f"{self.url(role)}/reset_prefix_cache") as response:
                response.raise_for_status()
                answer = json.loads(await response.text() or "{}")
            if answer.get("success", True):  # vLLM 0.26 does not say
                return True
            await self.poke(role)
            return False

        await eventually(is_cleared, f"the prefix cache of the {role.value} engine is cleared")

    async def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return (await self.stack.store.list_engines())[0].layout.block_bytes

    async def poke(self, role: EngineRole) -> None:
        """Lets an engine take a step, so that its scheduler applies what is pending."""
        body = {"model": MODEL, "prompt": uuid.uuid4().hex, "max_tokens": 1, "temperature": 0}
        async with self.session.post(f"{self.url(role)}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()


def request_body(messages: list[Message], **fields: Any) -> dict[str, Any]:
    """A chat completion of 24 greedy tokens with logprobs and token ids, streamed."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "stream": True,
        **fields,
    }
    if body["stream"]:
        body.setdefault("stream_options", {"include_usage": True})
    return body


def text_body(prompt: str | list[int], **fields: Any) -> dict[str, Any]:
    """A plain completion of 24 greedy tokens with logprobs and token ids, not streamed."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
        **fields,
    }


def choices_of(answer: Mapping[str, Any]) -> list[Completion]:
    """The choices of a whole answer, of either API."""
    replies: list[Completion] = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        reply = Completion()
        reply.add(
            {"choices": [choice if "message" in choice else _as_chat(choice)], "usage": answer["usage"]}
        )
        replies.append(reply)
    return replies


def _as_chat(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A choice of a plain completion in the shape of a chat's."""
    listed = choice["logprobs"]
    pairs = zip(listed["tokens"], listed["token_logprobs"], strict=True)
    content = [{"token": token, "logprob": logprob} for token, logprob in pairs]
    return {**choice, "message": {"content": choice["text"]}, "logprobs": {"content": content}}


def reusable_tokens(kept: list[int], prompt: list[int]) -> int:
    """Tokens of a prompt that a lease may serve: whole blocks that leave a token to compute.

    `kept` are the tokens of the lease's turn; the last of them has no KV.
    """
    return whole_blocks(min(common_tokens(kept[:-1], prompt), len(prompt) - 1))


def whole_blocks(tokens: int) -> int:
    """Tokens in whole blocks at the head of a run of `tokens`."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def common_tokens(left: list[int], right: list[int]) -> int:
    """Length of the longest common prefix."""
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return place
    return min(len(left), len(right))


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = AWAIT_S) -> None:
    """Waits until a condition holds; fails with `what` when it does not within a generous bound."""
    try:
        async with asyncio.timeout(within_s):
            while not await condition():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:.0f} s: {what}") from None
