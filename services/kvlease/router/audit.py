"""Asks an engine twice after a turn, once on the turn's lease and once cold, and compares the answers.

Only for turns whose reuse is `verify-only`. Both are greedy, short, and of one engine, so that equal KV gives equal
tokens; on GPUs a batch of another shape can still change a late token, so the first one is told apart.
"""

import logging
from enum import Enum
from typing import Any

from kvlease.core.holding import PinAsk
from kvlease.core.lease import LeaseKind
from kvlease.core.planning import choose_prefill
from kvlease.core.records import Engine, Pinned
from kvlease.core.turn import ReadOrder, TurnParams
from kvlease.router.bodies import parse_answer, prefill_body, report_of
from kvlease.router.dialect import Api, encode
from kvlease.router.ports import LegError
from kvlease.router.turn import Turn, TurnServices

AUDIT_TOKENS = 16
AUDITED_APIS = frozenset({Api.CHAT, Api.COMPLETIONS})

log = logging.getLogger(__name__)


class AuditOutcome(Enum):
    """How an audit ended. A closed set: it labels a metric."""

    EQUAL = "equal"
    DIFFERS_AT_ONCE = "differs_at_once"
    DIFFERS_LATER = "differs_later"
    NOT_REUSED = "not_reused"
    FAILED = "failed"


class Auditor:
    """Audits turns, one at a time and at most one per interval."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services
        self._engines = services.engines
        self._next_s = float("-inf")
        self._running = False

    def offer(self, turn: Turn) -> None:
        """A turn ended; it is audited when its lease can be read and it is time."""
        services, now_s = self._services, self._services.clock.now_s()
        interval_s = services.limits.audit_interval_s
        due = interval_s > 0 and not self._running and now_s >= self._next_s
        wanted = turn.record.ended == "well" and turn.record.lease_id and turn.request.api in AUDITED_APIS
        reader = self._reader(turn) if due and wanted else None
        if reader is None:
            return
        self._next_s = now_s + interval_s
        # Nobody renews its pin.
        services.background.run(self._audit(turn, reader), services.policy.reservation_s)

    def _reader(self, turn: Turn) -> Engine | None:
        """A prefill engine; another than the turn's, whose own cache would have the prompt, if there is one."""
        signals = self._engines.signals(turn.request.model)
        decode = next((e for e in signals if e.engine_id == turn.record.decode_engine_id), None)
        if decode is None:
            return None
        other = choose_prefill(signals, decode, {turn.record.prefill_engine_id})
        chosen = other or choose_prefill(signals, decode)
        return self._engines.get(chosen.engine_id) if chosen is not None else None

    async def _audit(self, turn: Turn, reader: Engine) -> None:
        self._running, outcome = True, AuditOutcome.FAILED
        try:
            outcome = await self._compare(turn, reader)
        except LegError:
            pass
        finally:
            self._running = False
            self._services.metrics.audited(outcome.value)
        extra = {"request_id": turn.record.request_id, "outcome": outcome.value}
        if outcome in (AuditOutcome.DIFFERS_AT_ONCE, AuditOutcome.DIFFERS_LATER):
            log.warning("reuse answers otherwise than a cold run", extra=extra)
        else:
            log.info("reuse audited", extra=extra)

    async def _compare(self, turn: Turn, reader: Engine) -> AuditOutcome:
        holder = self._engines.get(turn.record.decode_engine_id)
        if holder is None:
            return AuditOutcome.FAILED
        services, request = self._services, turn.request
        pin_id = services.random.text_id()
        ask = PinAsk(
            turn.record.lease_id,
            pin_id,
            holder.holder,
            request.tenant,
            reservation_s=services.policy.reservation_s,
        )
        pinned = await services.registry.pin(ask, services.limits.wait_for_offer_s)
        if not isinstance(pinned, Pinned):
            return AuditOutcome.NOT_REUSED
        order = ReadOrder(ask.lease_id, pin_id, LeaseKind.CONVERSATION, pinned.holder, holder.sidecar_address)
        reused = await self._ask(turn, reader, TurnParams(request.tenant, read=order), salt="")
        # Whose engine has answered in full, a pin is ours to end.
        await services.registry.unpin(pinned.holder, ask.lease_id, pin_id)
        report = report_of(reused)
        if report is None or not report.read_tokens:
            return AuditOutcome.NOT_REUSED
        cold = await self._ask(turn, reader, TurnParams(request.tenant), salt=services.random.text_id())
        return compared(_text(turn, reused), _text(turn, cold))

    async def _ask(self, turn: Turn, engine: Engine, params: TurnParams, salt: str) -> dict[str, Any]:
        """One short greedy answer; under a salt of its own no cache has any of it."""
        body = parse_answer(prefill_body(turn.request, params)) or {}
        body |= {"max_tokens": AUDIT_TOKENS, "temperature": 0}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = AUDIT_TOKENS
        if salt:
            body["cache_salt"] = salt
        request_id = f"audit-{self._services.random.text_id()}"
        headers = {**turn.head.engine_headers, **self._engines.headers(engine), "X-Request-Id": request_id}
        url = engine.url + turn.request.api.value
        timeout_s = self._services.limits.prefill_timeout_s
        async with self._services.engine_port.call("POST", url, headers, encode(body), timeout_s) as reply:
            answer = parse_answer(await reply.body()) if reply.status < 400 else None
        if answer is None:
            raise LegError(f"the engine answered {reply.status}", sent=True)
        return answer


def compared(reused: str, cold: str) -> AuditOutcome:
    """How two answers differ."""
    if reused == cold:
        return AuditOutcome.EQUAL
    return AuditOutcome.DIFFERS_AT_ONCE if reused[:1] != cold[:1] else AuditOutcome.DIFFERS_LATER


def _text(turn: Turn, answer: dict[str, Any]) -> str:
    reader = turn.request.dialect.reader()
    reader.read(answer)
    return reader.reply().text
