"""A turn's decision as it was recorded: what the plan was made of, and the plan. It can be made again anywhere.

Holds counts, rates and ids of engines; nothing of what was said.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from kvlease.core.errors import InvalidArgument
from kvlease.core.planning import Plan, plan
from kvlease.core.pricing import Price
from kvlease.core.rates import Line
from kvlease.core.records import EngineRole
from kvlease.core.signals import (
    EngineSignal,
    LeaseSignal,
    PlanLimits,
    PlanReason,
    ReadRates,
    TurnPath,
    TurnSignals,
)
from kvlease.core.values import value

DECISION_VERSION = 1


@value
class Decision:
    """One decision, and what became of its decode engine.

    Attributes:
        turn_id: the id of the turn's request.
        plan: None when no engine could decode.
        decode_anew_id: the decode engine that was chosen in place of the planned one when the prompt was computed;
            empty when that stayed.
        served_by_id: the decode engine that was asked last, so that it served the turn if one did; empty when
            none was.
    """

    turn_id: str
    signals: TurnSignals
    plan: Plan | None
    decode_anew_id: str = ""
    served_by_id: str = ""

    def again(self) -> Plan | None:
        """The plan that this version makes of the same signals."""
        return plan(self.signals)

    def to_json(self) -> dict[str, Any]:
        """The decision as a JSON object."""
        signals = self.signals
        body: dict[str, Any] = {
            "version": DECISION_VERSION,
            "turn_id": self.turn_id,
            "lease": signals.lease.value if isinstance(signals.lease, PlanReason) else asdict(signals.lease),
            "engines": [_engine_to_json(engine) for engine in signals.engines],
            "limits": asdict(signals.limits),
            "preferred_engine_id": signals.preferred_engine_id,
            "batch": signals.batch,
            "whole_prompt": signals.whole_prompt,
            "keep": signals.keep,
            "prompt_tokens": signals.prompt_tokens,
            "last_path": signals.last_path.value if signals.last_path else None,
            "readback": _line_to_json(signals.rates.readback),
            "handover": _line_to_json(signals.rates.handover),
            "pairs": [
                {"source_id": source, "sink_id": sink, "line": _line_to_json(line)}
                for (source, sink), line in signals.rates.pairs.items()
            ],
        }
        body["plan"] = None if self.plan is None else plan_to_json(self.plan)
        body["decode_anew_id"], body["served_by_id"] = self.decode_anew_id, self.served_by_id
        return body

    @staticmethod
    def from_json(value: object) -> "Decision":
        """Reads what `to_json` wrote.

        Raises:
            InvalidArgument: it is no decision, or of another version.
        """
        if not isinstance(value, Mapping):
            raise InvalidArgument("a decision is a JSON object")
        body = cast("Mapping[str, Any]", value)
        if body.get("version") != DECISION_VERSION:
            raise InvalidArgument(f"the decision has another version than {DECISION_VERSION}")
        try:
            return Decision(
                str(body["turn_id"]),
                _signals_of(body),
                _plan_of(body["plan"]),
                # Versions that did not record these knew the planned engine alone.
                str(body.get("decode_anew_id", "")),
                str(body.get("served_by_id", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"the decision lacks or distorts {error}") from error


def pairs_that_matter(signals: TurnSignals, made: Plan | None) -> Mapping[tuple[str, str], Line]:
    """Of the rates of pairs those that can have mattered to a plan, as they are at this moment."""
    known = signals.rates.pairs
    if not known:
        return {}
    lease, sink_id = signals.lease, made.decode_engine_id if made else ""
    source_id = lease.engine_id if isinstance(lease, LeaseSignal) else ""
    ids = [engine.engine_id for engine in signals.engines]
    pairs = {pair for one in ids for pair in ((source_id, one), (one, sink_id)) if pair in known}
    return {pair: known[pair] for pair in sorted(pairs)}


def decided(
    turn_id: str,
    signals: TurnSignals,
    made: Plan | None,
    pairs: Mapping[tuple[str, str], Line] | None = None,
) -> Decision:
    """The record of a decision, with the rates of the pairs that mattered when it was made: by default, now."""
    pairs = pairs_that_matter(signals, made) if pairs is None else pairs
    return Decision(turn_id, replace(signals, rates=replace(signals.rates, pairs=pairs)), made)


def plan_to_json(made: Plan) -> dict[str, Any]:
    """A plan as a JSON object."""
    return {
        "path": made.path.value,
        "reason": made.reason.value,
        "decode_engine_id": made.decode_engine_id,
        "prefill_engine_id": made.prefill_engine_id,
        "keep": made.keep,
        "prices": [{**asdict(price), "path": price.path.value} for price in made.prices],
    }


def _signals_of(body: Mapping[str, Any]) -> TurnSignals:
    lease, last_path = body["lease"], body["last_path"]
    pairs = {
        (pair["source_id"], pair["sink_id"]): line
        for pair in body["pairs"]
        if (line := _line_of(pair["line"])) is not None
    }
    return TurnSignals(
        lease=PlanReason(lease) if isinstance(lease, str) else LeaseSignal(**lease),
        engines=tuple(_engine_of(engine) for engine in body["engines"]),
        limits=PlanLimits(**body["limits"]),
        preferred_engine_id=body["preferred_engine_id"],
        batch=body["batch"],
        whole_prompt=bool(body.get("whole_prompt", False)),
        keep=body["keep"],
        prompt_tokens=body["prompt_tokens"],
        last_path=TurnPath(last_path) if last_path else None,
        rates=ReadRates(_line_of(body["readback"]), _line_of(body["handover"]), pairs),
    )


def _plan_of(body: Mapping[str, Any] | None) -> Plan | None:
    if body is None:
        return None
    prices = tuple(_price_of(price) for price in body["prices"])
    read: dict[str, Any] = {
        **body,
        "path": TurnPath(body["path"]),
        "reason": PlanReason(body["reason"]),
        "prices": prices,
    }
    return Plan(**read)


def _price_of(body: Mapping[str, Any]) -> Price:
    read: dict[str, Any] = {**body, "path": TurnPath(body["path"])}
    return Price(**read)


def _engine_to_json(engine: EngineSignal) -> dict[str, Any]:
    return {**asdict(engine), "role": engine.role.value}


def _engine_of(body: Mapping[str, Any]) -> EngineSignal:
    prefill = _line_of(body["prefill"])
    read: dict[str, Any] = {**body, "role": EngineRole(body["role"]), "prefill": prefill}
    return EngineSignal(**read)


def _line_to_json(line: Line | None) -> dict[str, Any] | None:
    return None if line is None else asdict(line)


def _line_of(body: Mapping[str, Any] | None) -> Line | None:
    return None if body is None else Line(**body)
