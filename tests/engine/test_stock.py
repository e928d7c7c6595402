"""vLLM's own connectors on the same histories: the comparison with a cold run must see that they are wrong.

The legs are driven by hand, as proxies for stock connectors do: the parameters that a decode engine returned are
echoed into the next turn's prefill leg.
"""

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.engine.conftest import REQUEST_TIMEOUT_S
from tests.engine.pair import MODEL, Message, choices_of, request_body

from kvlease.dev.check import EDITED, FIRST, SECOND, SYSTEM, THIRD
from kvlease.dev.completion import Completion, bytes_read
from kvlease.dev.engine_env import ensure_engine_environment
from kvlease.dev.engine_process import ConnectorChoice, EngineProcess, EngineRole, EngineSpec, free_ports
from kvlease.dev.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLY_TOKENS = 64
"""Two blocks: what is retained always has more blocks than the prompt it was retained for."""
Params = dict[str, Any]


@dataclass(frozen=True)
class StockPair:
    """A prefill and a decode engine with vLLM's own connectors, and nothing else."""

    session: aiohttp.ClientSession
    prefill_url: str
    decode_url: str

    async def turn(self, messages: list[Message], echoed: Params | None) -> tuple[Completion, Params]:
        """One turn, and the parameters that D returned with it."""
        asked = echoed or {"do_remote_decode": True, "do_remote_prefill": False}
        body = _body(messages)
        prefilled = await self._post(self.prefill_url, {**body, "max_tokens": 1, "kv_transfer_params": asked})
        handed_over = prefilled["kv_transfer_params"]
        decoded = await self._post(self.decode_url, {**body, "kv_transfer_params": handed_over})
        return choices_of(decoded)[0], decoded["kv_transfer_params"]

    async def cold(self, messages: list[Message]) -> Completion:
        """The same prompt computed from nothing."""
        answer = await self._post(self.decode_url, {**_body(messages), "cache_salt": uuid.uuid4().hex})
        return choices_of(answer)[0]

    async def forget_prefills(self) -> None:
        """Clears P's prefix cache, so that P has to READ."""
        async with self.session.post(f"{self.prefill_url}/reset_prefix_cache") as response:
            assert response.status == 200

    async def bytes_read_by_prefill(self) -> int:
        """Bytes that P has READ so far."""
        return await bytes_read(self.session, [self.prefill_url])

    async def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer


def _body(messages: list[Message]) -> dict[str, Any]:
    return request_body(messages, max_tokens=REPLY_TOKENS, stream=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(engines_lock: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StockPair]:
    """A running pair with stock connectors."""
    folder = tmp_path_factory.mktemp("stock")
    engines = [_engine(role, folder) for role in EngineRole]
    try:
        for engine in engines:
            await engine.start()
        for engine in engines:
            await engine.wait_ready()
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield StockPair(session, *(engine.base_url for engine in engines))
    finally:
        for engine in engines:
            await engine.stop()


def _engine(role: EngineRole, folder: Path) -> EngineProcess:
    port, side_channel_port = free_ports(2)
    return EngineProcess(
        EngineSpec(
            role=role,
            python=ensure_engine_environment(),
            model=ensure_tiny_model(),
            log_file=folder / f"{role.value}.log",
            port=port,
            side_channel_port=side_channel_port,
            connector=ConnectorChoice.STOCK,
            served_model_name=MODEL,
            environment={"VLLM_SERVER_DEV_MODE": "1"},
        )
    )


def opening(text: str) -> list[Message]:
    """A conversation's first request."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def continued(history: list[Message], reply: Completion, text: str) -> list[Message]:
    """The next request of a conversation."""
    return [*history, {"role": "assistant", "content": reply.text}, {"role": "user", "content": text}]


async def second_turn(stock: StockPair, case: str) -> tuple[list[Message], Params]:
    """A request after a conversation, and the parameters that the conversation's last turn returned."""
    first_request = opening(f"{FIRST} {case}")
    reply, params = await stock.turn(first_request, None)
    if case == "plain":
        return continued(first_request, reply, THIRD), params
    if case == "edited":
        return continued(opening(f"{EDITED} {case}"), reply, SECOND), params
    if case == "shortened":
        _, params = await stock.turn(continued(first_request, reply, THIRD), params)
    return first_request, params


@pytest.mark.parametrize(
    ("case", "right"), [("plain", True), ("edited", False), ("shortened", False), ("regenerated", False)]
)
async def test_the_comparison_with_a_cold_run_sees_what_stock_gets_wrong(
    stock: StockPair, case: str, right: bool
) -> None:
    request, params = await second_turn(stock, case)
    await stock.forget_prefills()
    before = await stock.bytes_read_by_prefill()
    reply, _ = await stock.turn(request, params)
    assert await stock.bytes_read_by_prefill() > before
    assert reply.equals(await stock.cold(request)) is right
