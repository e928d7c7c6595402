"""Reuse can be off, only verified, or on, by model and tenant, without a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvlease.core.conversation import tenant_digest
from kvlease.core.turn import TurnParams, TurnReport
from stubs.engines import Received, StubEngine
from stubs.router import FIRST, Stack, said
from stubs.waiting import eventually

OTHER_DUTIES_S = 1.0
"""What the router gives other duties."""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "reuse.toml"
    path.write_text("")
    return path


@pytest.fixture
def router_settings(rules: Path) -> dict[str, Any]:
    return {"reuse_file": str(rules), "keys_poll_s": 0.01}


def orders(engine: StubEngine, number: int) -> TurnParams | None:
    sent = engine.received[number].orders
    return None if sent is None else TurnParams.from_json(sent)


def write(rules: Path, text: str) -> None:
    """The whole file at once: the router may look at any moment."""
    whole = rules.with_suffix(".new")
    whole.write_text(text)
    whole.replace(rules)


async def test_with_reuse_off_nothing_is_kept_or_read_and_the_prompt_is_handed_over_all_the_same(
    stack: Stack, prefill: StubEngine, decode: StubEngine, rules: Path
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    write(rules, f'[[rule]]\ntenant = "{tenant_digest("anonymous")}"\nreuse = "off"\n')

    async def second() -> str:
        return (await stack.chat(said(FIRST, "hello", "more"), conversation_id="c")).route

    routes = [await second()]
    while routes[-1] != "recompute; reuse_off":
        routes.append(await second())
        assert len(routes) < 1000
    handed = orders(decode, -1)
    assert handed is not None
    assert handed.keep is None
    assert handed.read is not None


async def test_verify_only_computes_turns_anew_and_keeps_them(
    stack: Stack, prefill: StubEngine, decode: StubEngine, rules: Path
) -> None:
    write(rules, '[[rule]]\nreuse = "verify-only"\n')

    routes: list[str] = []
    while not routes or routes[-1] != "recompute; verify_only":
        routes.append((await stack.chat(FIRST, conversation_id="c")).route)
        assert len(routes) < 1000
    kept = orders(decode, -1)
    assert kept is not None
    assert kept.keep is not None
    lease_id = kept.keep.lease_id
    await eventually(lambda: lease_id in stack.registry.confirmed)


async def test_rules_that_make_no_sense_change_nothing(
    stack: Stack,
    prefill: StubEngine,
    decode: StubEngine,
    rules: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(rules, "[[rule]]\nreuse = 'maybe'\n")
    await eventually(lambda: "the file stays as it was" in caplog.text)
    first = await stack.chat(FIRST, conversation_id="c")
    assert first.route == "recompute; first_turn"
    assert (await stack.chat(said(FIRST, "hello", "more"), conversation_id="c")).route.startswith("append")


@pytest.mark.parametrize(
    ("read_tokens", "cold_reply", "outcome"),
    [
        (192, "hello", "equal"),
        (192, "jello", "differs_at_once"),
        (192, "helmet", "differs_later"),
        (0, "hello", "not_reused"),
    ],
)
async def test_verify_only_compares_a_sample_of_turns_with_cold_runs(
    stack: Stack,
    prefill: StubEngine,
    decode: StubEngine,
    rules: Path,
    caplog: pytest.LogCaptureFixture,
    read_tokens: int,
    cold_reply: str,
    outcome: str,
) -> None:
    caplog.set_level("INFO")
    write(rules, '[[rule]]\nreuse = "verify-only"\n')
    await eventually(lambda: "file loaded" in caplog.text)
    salts: list[str] = []

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        read = received.orders is not None and received.orders.get("read") is not None
        salts.append(received.body["cache_salt"])
        prefill.reply = "hello" if len(salts) < 3 else cold_reply
        prefill.report = TurnReport(200, 0, read_tokens if read else 0, 0, "read", kept_tokens=200)
        return await prefill.answer(request, received)

    prefill.script = answer
    assert (await stack.chat(FIRST)).status == 200
    await eventually(lambda: any(getattr(record, "outcome", None) for record in caplog.records))
    (audited,) = [record for record in caplog.records if getattr(record, "outcome", None)]
    assert audited.__dict__["outcome"] == outcome
    assert audited.levelname == ("WARNING" if outcome.startswith("differs") else "INFO")
    # The client's leg and the reused question share the tenant's salt; the cold one has its own.
    assert salts[0] == salts[1]
    assert len(salts) == (2 if outcome == "not_reused" else 3)
    assert salts[-1] != salts[0] or outcome == "not_reused"
    assert (await stack.chat(FIRST)).status == 200


async def test_an_audit_may_take_longer_than_other_duties_and_ends_with_the_router(
    stack: Stack, prefill: StubEngine, decode: StubEngine, rules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write(rules, '[[rule]]\nreuse = "verify-only"\n')
    await eventually(lambda: "file loaded" in caplog.text)

    async def answer_slowly(request: web.Request, received: Received) -> web.StreamResponse:
        read = received.orders is not None and received.orders.get("read") is not None
        if read:
            await asyncio.sleep(OTHER_DUTIES_S + 0.1)
        elif len(prefill.received) > 1:
            await asyncio.Event().wait()
        prefill.report = TurnReport(200, 0, 192 if read else 0, 0, "read", kept_tokens=200)
        return await prefill.answer(request, received)

    prefill.script = answer_slowly
    assert (await stack.chat(FIRST)).status == 200
    await eventually(lambda: len(prefill.received) == 3)
    async with asyncio.timeout(60):
        await stack.router.stop()
        await prefill.aborted.wait()
