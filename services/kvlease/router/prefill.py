"""The prefill leg.

Pins what is to be read, lets a prefill engine compute the prompt, and takes over its KV.
"""

from contextlib import nullcontext
from dataclasses import replace

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.planning import choose_prefill
from kvlease.core.records import Engine, Pinned
from kvlease.core.renewal import Belief
from kvlease.core.signals import REASON_OF_MISS, EngineSignal, LeaseSignal, PlanReason, TurnPath
from kvlease.core.turn import KeepOrder, ReadOrder, TurnParams
from kvlease.router.bodies import parse_answer, prefill_body, report_of
from kvlease.router.headers import answer_headers
from kvlease.router.ports import LegError
from kvlease.router.turn import (
    NOT_SERVED,
    TRIES_A_LEG,
    PinnedLease,
    Refusal,
    Turn,
    TurnServices,
    can_differ,
    may_go_on,
    without_prefill,
)

PASSING_MISSES = frozenset({MissReason.UNREACHABLE, MissReason.READING_CAP})
"""Misses that say nothing of the lease itself."""

NOTHING = nullcontext()


class PrefillLeg:
    """Runs the prefill leg of turns."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services

    async def run(self, turn: Turn) -> PinnedLease | Refusal | None:
        """The KV that waits for the decode engine, or the engine's refusal.

        None when D must do everything.
        """
        tried: set[str] = set()
        for _ in range(TRIES_A_LEG):
            engine = self._services.engines.get(turn.plan.prefill_engine_id)
            tried.add(turn.plan.prefill_engine_id)
            if engine is not None:
                try:
                    return await self._try(turn, engine)
                except LegError as failed:
                    turn.record.prefill_engine_id = ""
                    if failed.fault:
                        self._services.engines.suspect(engine.holder.engine_id)
            chosen = self._another(turn, tried)
            if chosen is None:
                break
            turn.plan = replace(turn.plan, prefill_engine_id=chosen.engine_id)
            turn.record.prefill_retries += 1
        turn.change_plan(without_prefill(turn, PlanReason.PREFILL_FAILED))
        return None

    def _another(self, turn: Turn, tried: set[str]) -> EngineSignal | None:
        signals = self._services.engines.signals(turn.request.model)
        decode = next((e for e in signals if e.engine_id == turn.plan.decode_engine_id), None)
        return choose_prefill(signals, decode, tried) if decode is not None else None

    async def _try(self, turn: Turn, engine: Engine) -> PinnedLease | Refusal | None:
        services = self._services
        pin = await self._pin(turn, engine) if turn.plan.path is TurnPath.READBACK else None
        # Whichever epoch it is granted in, since a reset that the watch has not told of yet loses no later lease.
        holder = Holder(engine.holder.engine_id, engine.holder.boot_id, 0)
        transfer = PinnedLease(
            services.random.lease_id(), services.random.text_id(), holder, engine.sidecar_address
        )
        turn.record.prefill_engine_id = engine.holder.engine_id
        body = prefill_body(turn.request, self._params(turn, pin, transfer))
        begun_s = services.clock.now_s()
        loads, engine_id = services.engines.loads, engine.holder.engine_id
        reading = NOTHING if pin is None else loads.reading(pin.holder.engine_id, engine_id)
        with loads.computing(engine_id, _tokens(turn, pin)), reading:
            answered = await self._call(turn, engine, pin, body)
        if answered.status >= 400:
            return answered
        turn.record.prefill_s = services.clock.now_s() - begun_s
        handover = self._take_over(turn, transfer, answered.body)
        self._measure(turn, engine, pin, begun_s)
        return handover

    def _measure(self, turn: Turn, engine: Engine, pin: PinnedLease | None, begun_s: float) -> None:
        if turn.report is None:
            return
        transcript = turn.request.transcript
        self._services.engines.loads.prefilled(
            engine,
            pin.holder.engine_id if pin is not None else "",
            begun_s,
            turn.report,
            transcript.keys if transcript is not None else (),
        )

    async def _pin(self, turn: Turn, engine: Engine) -> PinnedLease | None:
        """Pins the conversation's lease for one reader. Without a pin the turn recomputes."""
        services, base = self._services, turn.opened.base
        holder = services.engines.get(base.holder.engine_id) if base is not None else None
        if base is None or holder is None:
            self._recompute(turn, PlanReason.LEASE_LOST)
            return None
        pin = PinnedLease(base.lease_id, services.random.text_id(), base.holder, holder.sidecar_address)
        turn.loose_pins[pin.pin_id] = pin
        ask = PinAsk(
            pin.lease_id,
            pin.pin_id,
            pin.holder,
            turn.request.tenant,
            reservation_s=services.policy.reservation_s,
        )
        pending = services.renewals.belief(services.clock.now_s(), base.lease_id) is Belief.PENDING
        outcome = await services.registry.pin(ask, services.limits.wait_for_offer_s if pending else 0.0)
        if not isinstance(outcome, Pinned):
            if outcome is not MissReason.UNREACHABLE:
                del turn.loose_pins[pin.pin_id]
            if outcome not in PASSING_MISSES:
                services.renewals.lose(base.lease_id, outcome)
            self._recompute(turn, REASON_OF_MISS[outcome])
            return None
        if outcome.layout_hash not in ("", engine.layout.layout_hash):
            self._recompute(turn, PlanReason.LAYOUT_MISMATCH)
            return None
        services.renewals.hold_pin(pin.pin_id, pin.holder.engine_id)
        return replace(pin, holder=outcome.holder)

    def _recompute(self, turn: Turn, reason: PlanReason) -> None:
        turn.change_plan(replace(turn.plan, path=TurnPath.RECOMPUTE, reason=reason))

    def _params(self, turn: Turn, pin: PinnedLease | None, transfer: PinnedLease) -> TurnParams:
        read = (
            ReadOrder(pin.lease_id, pin.pin_id, LeaseKind.CONVERSATION, pin.holder, pin.sidecar_address)
            if pin is not None
            else None
        )
        keep = KeepOrder(
            transfer.lease_id,
            LeaseKind.TRANSFER,
            self._services.policy.reservation_s,
            pin_id=transfer.pin_id,
            conversation_key=turn.opened.conversation.key,
        )
        return TurnParams(turn.request.tenant, read=read, keep=keep)

    async def _call(self, turn: Turn, engine: Engine, pin: PinnedLease | None, body: bytes) -> Refusal:
        """The engine's whole answer: the prompt's, or what it finds wrong with the request."""
        services = self._services
        headers = {**turn.head.engine_headers, **services.engines.headers(engine)}
        url = engine.url + turn.request.api.value
        timeout_s = services.limits.prefill_timeout_s
        if pin is not None:
            turn.loose_pins.pop(pin.pin_id)
        try:
            with services.engines.running(engine.holder.engine_id):
                async with services.engine_port.call("POST", url, headers, body, timeout_s) as reply:
                    told = answer_headers(reply.headers) if reply.status >= 400 else {}
                    answered = Refusal(reply.status, told, await reply.body())
        except LegError as failed:
            if pin is not None and not failed.sent:
                turn.loose_pins[pin.pin_id] = pin
            raise
        finally:
            if pin is not None:
                services.renewals.drop_pin(pin.pin_id)
        if pin is not None and answered.status >= 400 and not may_go_on(answered.status):
            turn.loose_pins[pin.pin_id] = pin
        if can_differ(answered.status):
            fault = answered.status not in NOT_SERVED
            raise LegError(f"the prefill engine answered {answered.status}", sent=True, fault=fault)
        return answered

    def _take_over(self, turn: Turn, transfer: PinnedLease, raw: bytes) -> PinnedLease | None:
        services = self._services
        answer = parse_answer(raw)
        reader = turn.request.dialect.reader()
        if answer is not None:
            reader.read(answer)
        if answer is None or reader.failed:
            raise LegError("the prefill engine's answer is no answer", sent=True)
        report = report_of(answer)
        if report is not None:
            turn.note_report(report)
        if report is None or report.kept_tokens == 0:
            turn.change_plan(without_prefill(turn, PlanReason.PREFILL_FAILED))
            return None
        turn.loose_pins[transfer.pin_id] = transfer
        services.renewals.hold_pin(transfer.pin_id, transfer.holder.engine_id)
        return transfer


def _tokens(turn: Turn, pin: PinnedLease | None) -> int:
    """Tokens of the prompt that the prefill engine has to compute, as far as is known."""
    signals = turn.signals
    if signals is None:
        return 0
    lease = signals.lease
    if pin is not None and isinstance(lease, LeaseSignal) and lease.suffix_tokens is not None:
        return lease.suffix_tokens
    return signals.prompt_tokens
