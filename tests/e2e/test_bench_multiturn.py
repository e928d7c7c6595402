"""`kvlease bench multiturn` on engines that run already: simulated ones behind a router, and two that act as stock."""

import asyncio
import json
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvlease.bench.multiturn import main
from kvlease.bench.multiturn.flags import KEY_VARIABLE
from kvlease.core.records import EngineRole
from kvlease.dev.main import simulated_engine
from kvlease.dev.stack import Stack, StackPlan
from kvlease.router.config import RouterConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = ("--points", "512+128", "--repeats", "2", "--vocabulary", "250")


async def bench(*flags: str) -> int:
    """Runs the command, which has an event loop of its own."""
    parser = ArgumentParser()
    main.add_arguments(parser)
    return await asyncio.to_thread(main.run, parser.parse_args(flags))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    router = RouterConfig(append_tokens_max=0, rate_samples_min=0)
    built = Stack(StackPlan(1, 1, simulated_engine, router=router), lambda _: None)
    await built.start()
    try:
        yield built
    finally:
        await built.stop()


def where(stack: Stack) -> tuple[str, ...]:
    (prefill,), (decode,) = (stack.engine_urls(role) for role in (EngineRole.PREFILL, EngineRole.DECODE))
    return "--router-url", stack.router_url, "--prefill-url", prefill, "--decode-url", decode


async def test_a_running_routers_own_mode_is_measured_kept_and_gone_on_from(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    measured = (*where(stack), *SMALL, "--output", str(path))
    assert await bench(*measured, "--modes", "on") == 0
    document = json.loads(path.read_text())
    assert [(turn["mode"], turn["path"]) for turn in document["turns"]] == [("on", "readback")] * 2
    assert all(turn["bytes"] > 0 and turn["input_num_tokens"] == 512 + 32 + 128 for turn in document["turns"])
    assert len(document["runs"]) == 1

    # The record is whole: nothing is measured again. What the router does is not what this mode is to show.
    assert await bench(*measured, "--modes", "on", "--resume") == 0
    assert await bench(*measured, "--modes", "off", "--resume", "--repeats", "1") == 0
    document = json.loads(path.read_text())
    assert (len(document["turns"]), len(document["runs"])) == (3, 2)
    assert "not the path of its mode: off by readback, 1 turns" in capsys.readouterr().err

    assert await bench(*measured, "--resume", "--output-tokens", "16") == 1
    assert "was measured with output_tokens 32, not 16" in capsys.readouterr().err


async def test_conversations_of_a_file_are_replayed_through_a_running_router(
    stack: Stack, tmp_path: Path
) -> None:
    path, record = tmp_path / "talk.json", tmp_path / "record.json"
    said = [("user", "What is a lease? " * 20), ("assistant", "It ends. " * 4)] * 2
    messages = [{"role": role, "content": content} for role, content in said]
    path.write_text(json.dumps([{"id": "a", "messages": messages}]))
    replay = ("--input", str(path), "--repeats", "1", "--vocabulary", "250", "--output", str(record))
    assert await bench(*where(stack), *replay) == 0
    turns = json.loads(record.read_text())["turns"]
    assert [(turn["mode"], turn["turn"], turn["path"]) for turn in turns] == [
        ("auto", 1, "recompute"),
        ("auto", 2, "readback"),
    ]
    assert turns[1]["input_num_tokens"] > turns[0]["input_num_tokens"] > 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--router-url", "DECODE", "--vocabulary", "250"), "not as a kvlease router does"),
        (("--router-url", "ROUTER"), "--vocabulary"),
        (
            ("--router-url", "ROUTER", "--vocabulary", "250", "--decode-url", "http://127.0.0.1:9"),
            "no answer",
        ),
        (
            ("--router-url", "ROUTER", "--vocabulary", "250", "--decode-url", "ADMIN"),
            "/v1/models answered 404",
        ),
    ],
)
async def test_what_is_no_router_or_engine_is_named(
    stack: Stack, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], why: str
) -> None:
    _, router, prefill_flag, prefill, decode_flag, decode = where(stack)
    names = {"ROUTER": router, "DECODE": decode, "ADMIN": stack.admin_urls()["registry"]}
    given = (names.get(flag, flag) for flag in flags)
    assert await bench(prefill_flag, prefill, decode_flag, decode, *given) == 1
    assert why in capsys.readouterr().err


# --- stock ----------------------------------------------------------------------------------------------------


class StockEngine:
    """Answers as vLLM with its own NIXL connector does: what D kept is READ by P, where P is told to.

    Args:
        reads: a prefill engine that READs what it is told; one that does not computes everything.
    """

    def __init__(self, model: str = "stock", reads: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.bytes_read = 0
        self._model = model
        self._reads = reads

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.add(request.headers.get("Authorization"))
        params = body["kv_transfer_params"]
        has = params["remote_block_ids"] is not None
        if has and self._reads:
            self.bytes_read += 1000
        cached = len(body["prompt"]) - 128 if has and self._reads else 0
        choice = {"index": 0, "text": "", "token_ids": [9] * body["max_tokens"]}
        if not body["stream"]:
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            kept = {**params, "remote_block_ids": [1], "remote_engine_id": "d"}
            return web.json_response({"choices": [choice], "usage": usage, "kv_transfer_params": kept})
        event = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return web.Response(text=event, content_type="text/event-stream")

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self._model, "root": "somewhere", "max_model_len": 900}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        info = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0"} 1.0\n'
        return web.Response(text=f'{info}vllm:nixl_bytes_transferred_sum{{engine="0"}} {self.bytes_read}\n')


async def stock(prefill: StockEngine, decode: StockEngine, *flags: str) -> int:
    async with TestServer(prefill.app()) as p, TestServer(decode.app()) as d:
        urls = [str(server.make_url("")).rstrip("/") for server in (p, d)]
        return await bench("--prefill-url", urls[0], "--decode-url", urls[1], *SMALL, *flags)


async def test_two_stock_engines_are_measured_as_the_example_proxy_drives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prefill, decode = tmp_path / "record.json", StockEngine(), StockEngine()
    monkeypatch.setenv(KEY_VARIABLE, "a-secret")
    assert await stock(prefill, decode, "--output", str(path)) == 0
    document = json.loads(path.read_text())
    for turn in document["turns"]:
        assert (turn["mode"], turn["path"], turn["reused_tokens"]) == ("stock", "readback", 512 + 32)
        assert (turn["prefill_bytes"], turn["bytes"]) == (1000, 2000)
    first, second = prefill.asked[-2:]
    assert first["kv_transfer_params"]["remote_block_ids"] is None
    assert second["kv_transfer_params"]["remote_engine_id"] == "d"
    assert [one["stream"] for one in decode.asked[-2:]] == [False, True]
    facts = {"model": "stock", "max_model_len": 900, "vllm": "", "block_size": 16, "prefix_cache": True}
    assert prefill.keys == decode.keys == {"Bearer a-secret"}
    assert "a-secret" not in path.read_text()
    assert "has a prefix cache of its own" in capsys.readouterr().err
    assert document["settings"]["stock engines"] == {"prefill": [facts], "decode": [facts]}


@pytest.mark.parametrize(
    ("prefill", "flags", "why"),
    [
        (StockEngine(reads=False), (), "the stock prefill engine READ nothing back"),
        (StockEngine("other"), (), "serves 'other', but"),
        (StockEngine(), ("--points", "800+128"), "needs 976 tokens"),
    ],
)
async def test_stock_engines_that_show_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], prefill: StockEngine, flags: tuple[str, ...], why: str
) -> None:
    assert await stock(prefill, StockEngine(), *flags) == 1
    assert why in capsys.readouterr().err
