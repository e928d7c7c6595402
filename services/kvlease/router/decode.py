"""The decode leg.

Passes the decode engine's answer to the client, and grants the turn's lease when it ended well.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

from kvlease.core.lease import LeaseKind
from kvlease.core.planning import choose_decode
from kvlease.core.records import Engine
from kvlease.core.signals import LeaseSignal, PlanReason, TurnPath
from kvlease.core.turn import CHAIN_KEYS_MAX, KeepOrder, ReadOrder, TurnParams
from kvlease.router.bodies import client_answer, decode_body, parse_answer, report_of
from kvlease.router.counted import Held
from kvlease.router.dialect import ReplyReader
from kvlease.router.errors import error_event
from kvlease.router.headers import answer_headers
from kvlease.router.ports import EngineReply, LegError
from kvlease.router.resume import RESUMED_PATH, ContinuedDialect, RememberingDialect, memory_of
from kvlease.router.sse import EventSplitter, StreamCleaner
from kvlease.router.turn import (
    NOT_SERVED,
    TRIES_A_LEG,
    PinnedLease,
    Refusal,
    Turn,
    TurnServices,
    broken,
    can_differ,
    end_of,
    may_go_on,
    refused,
    route_headers,
    unavailable,
    without_prefill,
)

log = logging.getLogger(__name__)

DRAIN_S = 0.1
"""How long the end of a stream is waited for after its last event, so that its connection can be used again."""


class DecodeLeg:
    """Runs the decode leg of turns."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services

    async def run(self, turn: Turn, handover: PinnedLease | None) -> None:
        """Answers the client. An engine that fails before its first byte is replaced once.

        So is one that answers with a fault of its own (5xx, or 200 with an error or what is no answer), is too busy
        (408, 429), or does not have the model; where nobody can replace it, the client gets that answer as it is.
        """
        request = turn.request
        tried: set[str] = set()
        for tries_left in reversed(range(TRIES_A_LEG)):
            turn.request = request
            self._remember_stream(turn)
            engine = self._services.engines.get(turn.plan.decode_engine_id)
            tried.add(turn.plan.decode_engine_id)
            sent = False
            if engine is not None:
                try:
                    await self._try(turn, engine, handover, tried if tries_left else None)
                    return
                except LegError as failed:
                    sent = failed.sent
                    if turn.answered:
                        await self._break_off(turn, tried)
                        return
            if not self._replace_engine(turn, tried, handover if not sent else None):
                break
            handover = handover if turn.plan.prefill_engine_id else None
        turn.record.ended = "badly"
        await unavailable(turn.client, turn.head, "no decode engine answers")

    async def _break_off(self, turn: Turn, tried: set[str]) -> None:
        """A stream that has begun is never replayed; one whose choices have all ended lacks nothing."""
        if turn.record.ended == "well":
            await turn.client.end()
        elif not await self._resume(turn, tried):
            await broken(turn, 502, "the decode engine broke off its answer")

    def _remember_stream(self, turn: Turn) -> None:
        """Keeps what it takes to resume the turn's stream, where that is wanted and possible."""
        request = turn.request
        memory = memory_of(request.api, request.body) if self._services.limits.resume_streams else None
        if memory is not None:
            turn.memory = memory
            turn.request = replace(request, dialect=RememberingDialect(request.dialect, memory))

    async def _resume(self, turn: Turn, tried: set[str]) -> bool:
        """Lets another engine go on where a stream broke off; False when none did to the end."""
        memory, reader = turn.memory, turn.reader
        if memory is None or reader is None or not memory.can_resume:
            return False
        if not self._replace_engine(turn, tried, None):
            return False
        engine = self._services.engines.get(turn.plan.decode_engine_id)
        if engine is None:
            return False
        log.info(
            "stream resumed", extra={"request_id": turn.head.request_id, "tokens": len(memory.token_ids)}
        )
        dialect = ContinuedDialect(turn.request.dialect, memory, turn.request.body, reader)
        turn.request = replace(turn.request, dialect=dialect)
        try:
            await self._try(turn, engine, None, None, RESUMED_PATH)
        except LegError:
            return turn.record.ended == "well"
        return True

    def _can_replace(self, turn: Turn, tried: set[str] | None) -> bool:
        signals = self._services.engines.signals(turn.request.model)
        return tried is not None and choose_decode(signals, without=tried) is not None

    def _replace_engine(self, turn: Turn, tried: set[str], handover: PinnedLease | None) -> bool:
        """Plans the turn for another decode engine.

        It gets the handed over KV when nobody else may read it.
        """
        signals = self._services.engines.signals(turn.request.model)
        chosen = choose_decode(signals, without=tried)
        if chosen is None:
            return False
        turn.record.decode_retries += 1
        changed = replace(turn.plan, decode_engine_id=chosen.engine_id, keep=chosen.retain)
        prefill = self._services.engines.get(turn.plan.prefill_engine_id)
        fits = prefill is not None and prefill.layout.layout_hash == chosen.layout_hash and chosen.retain
        if handover is not None and fits:
            turn.change_plan(replace(changed, reason=PlanReason.DECODE_FAILED))
        else:
            turn.plan = changed
            turn.change_plan(without_prefill(turn, PlanReason.DECODE_FAILED))
        return True

    async def _try(
        self,
        turn: Turn,
        engine: Engine,
        handover: PinnedLease | None,
        tried: set[str] | None,
        path: str = "",
    ) -> None:
        """Relays one engine's answer; `tried` names the engines that may not replace it, None: nobody may.

        `path` is the engine's when it is not the one of the request's API.
        """
        services = self._services
        engine_id = engine.holder.engine_id
        turn.record.lease_id = services.random.lease_id() if turn.plan.keep else 0
        turn.record.decode_engine_id = engine_id
        turn.request.dialect.reused(turn.record.reused_tokens if handover is not None else None)
        body = decode_body(turn.request, self._params(turn, handover))
        headers = {**turn.head.engine_headers, **services.engines.headers(engine)}
        url = engine.url + (path or turn.request.api.value)
        timeout_s = services.limits.turn_timeout_s
        if handover is not None:
            turn.loose_pins.pop(handover.pin_id, None)
        turn.decode_begun_s = services.clock.now_s()
        try:
            tokens = turn.signals.prompt_tokens if turn.signals is not None else 0
            occupying = services.engines.loads.occupying(engine_id, tokens)
            with services.engines.running(engine_id), occupying, turn.until_first_byte as load:
                if not turn.answered:  # the first byte of the rest of a stream would not end the count
                    self._count(load, turn, engine_id, handover)
                async with services.engine_port.call("POST", url, headers, body, timeout_s) as reply:
                    if can_differ(reply.status) and self._can_replace(turn, tried):
                        raise _answered(reply.status)
                    if path and not _is_stream(reply):
                        raise LegError("the engine does not resume the stream", sent=True, fault=False)
                    await self._relay(turn, engine, handover, reply, tried)
        except LegError as failed:
            if failed.fault:
                services.engines.suspect(engine_id)
            if handover is not None and not failed.sent:
                turn.loose_pins[handover.pin_id] = handover
            raise
        finally:
            if handover is not None and handover.pin_id not in turn.loose_pins:
                services.renewals.drop_pin(handover.pin_id)

    def _count(self, load: Held, turn: Turn, engine_id: str, handover: PinnedLease | None) -> None:
        """What the leg asks of the engine before its first byte, and of the one that it reads."""
        loads, signals = self._services.engines.loads, turn.signals
        if handover is not None:
            load.hold(loads.reading(handover.holder.engine_id, engine_id))
        elif signals is not None:
            suffix_tokens = _suffix_tokens(turn, engine_id)
            tokens = signals.prompt_tokens if suffix_tokens is None else suffix_tokens
            load.hold(loads.computing(engine_id, tokens))

    def _params(self, turn: Turn, handover: PinnedLease | None) -> TurnParams | None:
        read = (
            ReadOrder(
                handover.lease_id,
                handover.pin_id,
                LeaseKind.TRANSFER,
                handover.holder,
                handover.sidecar_address,
            )
            if handover is not None
            else None
        )
        if not turn.plan.keep:
            return TurnParams(turn.request.tenant, read=read) if read is not None else None
        transcript = turn.request.transcript
        keep = KeepOrder(
            turn.record.lease_id,
            LeaseKind.CONVERSATION,
            self._services.policy.provisional_s,
            conversation_key=turn.opened.conversation.key,
            chain_keys=transcript.keys[-CHAIN_KEYS_MAX:] if transcript is not None else (),
            supersedes=turn.opened.supersedes,
        )
        return TurnParams(turn.request.tenant, read=read, keep=keep)

    async def _relay(
        self,
        turn: Turn,
        engine: Engine,
        handover: PinnedLease | None,
        reply: EngineReply,
        tried: set[str] | None,
    ) -> None:
        if reply.status >= 400:
            body = await reply.body()
            if handover is not None and not may_go_on(reply.status):
                turn.loose_pins[handover.pin_id] = handover
            await refused(turn, Refusal(reply.status, answer_headers(reply.headers), body))
        elif _is_stream(reply):
            await self._relay_stream(turn, engine, handover, reply, tried)
        else:
            await self._relay_whole(turn, engine, reply, tried)

    async def _relay_whole(
        self, turn: Turn, engine: Engine, reply: EngineReply, tried: set[str] | None
    ) -> None:
        raw = await reply.body()
        answer = parse_answer(raw)
        reader = turn.request.dialect.reader()
        if answer is not None:
            reader.read(answer)
        if answer is None or reader.failed:
            if self._can_replace(turn, tried):
                raise LegError("the decode engine gave no answer", sent=True)
            await broken(turn, 502, "the decode engine gave no answer")
            return
        turn.record.ttft_s = self._services.clock.now_s() - turn.started_s
        report = report_of(answer)
        self._end(turn, engine, reader, kept=report is None or report.kept_tokens > 0)
        self._learn(turn, reader)
        headers = {**answer_headers(reply.headers), **route_headers(turn)}
        await turn.client.answer(reply.status, headers, client_answer(raw, answer, turn.request.dialect))

    async def _relay_stream(
        self,
        turn: Turn,
        engine: Engine,
        handover: PinnedLease | None,
        reply: EngineReply,
        tried: set[str] | None,
    ) -> None:
        splitter = EventSplitter()
        turn.reader = reader = turn.request.dialect.reader()
        cleaner = StreamCleaner(reader, turn.request.dialect)
        chunks = reply.chunks()
        async for chunk in chunks:
            parts: list[bytes] = []
            for event in splitter.feed(chunk):
                done_before = cleaner.done
                passed = cleaner.take(event)
                if cleaner.done and not done_before and reader.failed_silently:
                    parts.append(error_event(502, "the engine failed", "engine_failed", turn.request.api))
                parts.append(passed)
            replaceable = reader.failed and not turn.answered and not _is_refusal(cleaner.error_status)
            if replaceable and self._can_replace(turn, tried):
                raise LegError("the decode engine failed before its first token", sent=True)
            if not turn.record.ended and reader.finished_well:
                self._end(turn, engine, reader, kept=True)
            if turn.record.ended:
                self._learn(turn, reader)
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            if data:
                if not turn.answered:
                    await self._begin(turn, handover, reply)
                await turn.client.write(data)
            if cleaner.done:
                break
        if not cleaner.done and not reader.finished_well:
            raise LegError("the stream ended early", sent=True)
        turn.record.ended = turn.record.ended or end_of(cleaner.error_status)
        await turn.client.end()
        await _drain(chunks)

    async def _begin(self, turn: Turn, handover: PinnedLease | None, reply: EngineReply) -> None:
        """The first bytes of a stream are there: what was waited for is known, and the client gets a head."""
        turn.until_first_byte.close()
        turn.record.ttft_s = self._services.clock.now_s() - turn.started_s
        self._measure(turn, handover)
        if handover is not None:
            self._services.renewals.drop_pin(handover.pin_id)
        turn.answered = True
        await turn.client.start(reply.status, {**answer_headers(reply.headers), **route_headers(turn)})

    def _measure(self, turn: Turn, handover: PinnedLease | None) -> None:
        """Learns from a first byte how fast KV comes from a prefill engine, or how fast the engine appends."""
        services = self._services
        engine = services.engines.get(turn.record.decode_engine_id)
        if engine is None:
            return
        seconds = services.clock.now_s() - turn.decode_begun_s
        suffix_tokens = _suffix_tokens(turn, engine.holder.engine_id)
        if handover is not None:
            tokens = turn.record.prompt_tokens if suffix_tokens is None else suffix_tokens
            services.engines.loads.handed_over(handover.holder.engine_id, engine, tokens, seconds)
        elif turn.plan.path is TurnPath.APPEND and suffix_tokens:
            services.engines.loads.appended(engine, suffix_tokens, seconds)

    def _end(self, turn: Turn, engine: Engine, reader: ReplyReader, *, kept: bool) -> None:
        """The engine has finished.

        A turn that ended well has a lease, confirmed by the next beat, at once.
        """
        services, opened = self._services, turn.opened
        if not reader.finished_well:
            turn.record.ended = "badly"
            return
        turn.record.ended = "well"
        turn.request.dialect.remember(reader)
        opened.conversation.decode_engine_id = engine.holder.engine_id
        if not turn.record.lease_id or not kept:
            services.conversations.finish_without_lease(
                opened, reader.reply(), awaits_tools=reader.awaits_tools
            )
            return
        left = services.conversations.grant(
            opened,
            turn.record.lease_id,
            engine.holder,
            reader.reply(),
            awaits_tools=reader.awaits_tools,
        )
        services.heartbeat.wake()
        if left is not None:
            release = services.registry.release(left.lease_id, left.holder.engine_id, turn.request.tenant)
            services.background.run(release)

    def _learn(self, turn: Turn, reader: ReplyReader) -> None:
        """Takes the engine's counts, as soon as they are known."""
        usage, record = reader.usage, turn.record
        if record.ended != "well" or not usage.prompt_tokens:
            return
        record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        if not turn.plan.prefill_engine_id:
            record.reused_tokens = usage.cached_tokens
        self._services.conversations.learn(
            turn.opened, record.lease_id, usage.prompt_tokens, usage.completion_tokens
        )


def _suffix_tokens(turn: Turn, engine_id: str) -> int | None:
    """Tokens of the prompt after what the engine itself uses; None when it uses nothing that it holds."""
    signals = turn.signals
    lease = signals.lease if signals is not None and not signals.whole_prompt else None
    return lease.suffix_tokens if isinstance(lease, LeaseSignal) and lease.engine_id == engine_id else None


def _answered(status: int) -> LegError:
    """An engine's answer as a failure: one that refuses has begun nothing."""
    fault = status not in NOT_SERVED
    return LegError(f"the decode engine answered {status}", sent=may_go_on(status), fault=fault)


def _is_refusal(status: int) -> bool:
    """Whether an engine finds fault with the request itself, as any other one would."""
    return 400 <= status < 500 and not can_differ(status)


def _is_stream(reply: EngineReply) -> bool:
    return reply.status < 400 and reply.headers.get("Content-Type", "").startswith("text/event-stream")


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError, LegError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in chunks:
                pass
