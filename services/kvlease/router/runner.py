"""Runs turns: plans, prefills elsewhere when the plan says so, and passes the decode engine's answer on."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from kvlease.core.planning import plan, with_decode_anew
from kvlease.core.records import EngineRole
from kvlease.core.reuse_rules import ReuseMode
from kvlease.core.signals import PlanReason, TurnSignals
from kvlease.router.admission import Overloaded
from kvlease.router.audit import Auditor
from kvlease.router.bodies import TurnRequest
from kvlease.router.conversation import OpenTurn, TurnRecord
from kvlease.router.decode import DecodeLeg
from kvlease.router.engines import NOTHING_CACHED
from kvlease.router.in_flight import CUT_S
from kvlease.router.ports import ClientPort, ClientStalled
from kvlease.router.prefill import PrefillLeg
from kvlease.router.turn import (
    PinnedLease,
    Refusal,
    RequestHead,
    Turn,
    TurnServices,
    broken,
    overloaded,
    refused,
    unavailable,
)
from kvlease.router.unserved import NONE_REGISTERED, Unserved, unserved
from kvlease.wire import attributes

log = logging.getLogger(__name__)

ANEW_AFTER_S = 0.1
"""A prefill leg that took less has changed little at decode engines."""


class TurnRunner:
    """Runs turns; one instance for all of them."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services
        tracing, port = services.tracing, services.engine_port
        prefill = tracing.engines(services.metrics.engines(port, "prefill"), attributes.PREFILL)
        decode = tracing.engines(services.metrics.engines(port, "decode"), attributes.DECODE)
        self._prefill = PrefillLeg(replace(services, engine_port=prefill))
        self._auditor = Auditor(services)
        self._decode = DecodeLeg(replace(services, engine_port=decode))

    async def run(self, request: TurnRequest, head: RequestHead, client: ClientPort) -> None:
        """Answers the client, whatever happens. Cancelling it aborts both legs.

        Raises:
            ClientStalled: the turn's time was over, and the client did not take even that.
        """
        with self._services.tracing.turn(head.engine_headers):
            try:
                async with self._services.admission.admitted(request.tenant, request.model):
                    await self._run(request, head, client)
            except Overloaded as refusal:
                self._services.metrics.refused(refusal.code)
                await overloaded(client, head, refusal)

    async def _run(self, request: TurnRequest, head: RequestHead, client: ClientPort) -> None:
        services = self._services
        opened = services.conversations.open(request)
        services.tracing.opened(opened)
        turn: Turn | None = None
        try:
            with services.tracing.planning():
                turn = self._plan(request, head, client, opened)
                services.tracing.planned(turn.plan if turn is not None else None)
            if turn is None:
                why = self._unserved(request)
                await unavailable(client, head, why.message, why.code)
                return
            opened.conversation.turns.append(turn.record)
            async with asyncio.timeout(services.limits.turn_timeout_s) as bound:
                with services.in_flight.cut_by(bound):
                    await self._run_legs(turn)
        except TimeoutError:
            if turn is not None:
                stops = services.in_flight.ending
                told = (503, "the router stops") if stops else (504, "the turn took too long")
                try:
                    async with asyncio.timeout(CUT_S):
                        await broken(turn, *told)
                except TimeoutError as error:
                    raise ClientStalled from error
        finally:
            services.conversations.close(opened)
            if turn is not None:
                self._close(turn)

    def _unserved(self, request: TurnRequest) -> Unserved:
        engines = self._services.engines.signals(request.model)
        return unserved(e.draining for e in engines if e.role is EngineRole.DECODE) or NONE_REGISTERED

    def _plan(
        self, request: TurnRequest, head: RequestHead, client: ClientPort, opened: OpenTurn
    ) -> Turn | None:
        services = self._services
        signals = self._signals(request, opened)
        planned = plan(signals)
        turn_id, decisions = head.request_id, services.decisions
        if planned is None:
            decisions.end(decisions.note(request.tenant, turn_id, signals, None, None))
            return None
        record = TurnRecord(turn_id, planned.path, planned.reason, nonce=request.nonce)
        noted = decisions.note(request.tenant, turn_id, signals, planned, record)
        now_s = services.clock.now_s()
        return Turn(request, head, client, opened, planned, record, now_s, signals=signals, noted=noted)

    def _signals(self, request: TurnRequest, opened: OpenTurn) -> TurnSignals:
        """What is known at this moment of the lease, the engines, and the time that work takes them."""
        services, conversation, transcript = self._services, opened.conversation, request.transcript
        loads, estimate = services.engines.loads, conversation.estimate
        cached: Mapping[str, int] = NOTHING_CACHED
        if transcript is not None:
            cached = loads.cached_tokens(transcript.keys, transcript.ends, estimate)
        engines = services.engines.signals(request.model, cached)
        layout_hash = next((e.layout_hash for e in engines if e.role is EngineRole.DECODE), "")
        lease = services.conversations.lease_signal(opened)
        mode = services.reuse.mode(request.model, request.tenant)
        if mode is not ReuseMode.ON:
            lease = PlanReason.REUSE_OFF if mode is ReuseMode.OFF else PlanReason.VERIFY_ONLY
        return TurnSignals(
            lease=lease,
            engines=engines,
            limits=services.limits.plan,
            preferred_engine_id=conversation.decode_engine_id,
            batch=transcript is None,
            whole_prompt=request.prompt_logprobs,
            keep=mode is not ReuseMode.OFF,
            prompt_tokens=estimate.tokens(transcript.text_bytes) if transcript is not None else 0,
            last_path=conversation.turns[-1].path if conversation.turns else None,
            rates=loads.read_rates(layout_hash),
        )

    async def _run_legs(self, turn: Turn) -> None:
        handover: PinnedLease | None = None
        if turn.plan.prefill_engine_id:
            outcome = await self._prefill.run(turn)
            if isinstance(outcome, Refusal):
                await refused(turn, outcome)
                return
            handover = outcome
            self._choose_decode_anew(turn)
        await self._decode.run(turn, handover)

    def _choose_decode_anew(self, turn: Turn) -> None:
        """The prompt is computed: where that took a while, the decode engine is the one that is best by now."""
        services, signals = self._services, turn.signals
        if signals is None or services.clock.now_s() - turn.started_s < ANEW_AFTER_S:
            return
        engines = services.engines.signals(turn.request.model)
        anew = with_decode_anew(turn.plan, signals, engines)
        if anew.decode_engine_id != turn.plan.decode_engine_id:
            turn.record.decode_anew_id = anew.decode_engine_id
        turn.plan = anew

    def _close(self, turn: Turn) -> None:
        services, record = self._services, turn.record
        for pin in turn.loose_pins.values():
            services.renewals.drop_pin(pin.pin_id)
            services.unpin(pin)
        record.ended = record.ended or "aborted"
        if turn.noted is not None:
            services.decisions.end(turn.noted)
        services.metrics.observe(record, turn.request.tenant)
        if services.reuse.mode(turn.request.model, turn.request.tenant) is ReuseMode.VERIFY_ONLY:
            self._auditor.offer(turn)
        services.tracing.closed(turn)
        if log.isEnabledFor(logging.INFO):
            _tell(record)


def _tell(record: TurnRecord) -> None:
    log.info(
        "turn",
        extra={
            "request_id": record.request_id,
            "path": record.path.value,
            "reason": record.reason.value,
            "ended": record.ended,
            "prompt_tokens": record.prompt_tokens,
            "reused_tokens": record.reused_tokens,
            "ttft_ms": None if record.ttft_s is None else round(record.ttft_s * 1e3, 1),
        },
    )
