"""`kvlease explain`: makes a recorded decision again, and says what each path would have cost."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from kvlease.core.decisions import Decision, plan_to_json
from kvlease.core.errors import InvalidArgument
from kvlease.core.planning import Plan
from kvlease.core.signals import LeaseSignal, PlanReason
from kvlease.operator.command import Exit, OperatorError, Output, not_found, perform
from kvlease.operator.connection import fleet
from kvlease.operator.flags import add_common_flags, base_url

NOT_KEPT = "decision_not_found"
"""The router's code for a turn whose decision it does not know, or not of this tenant."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease explain`."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="lines of a router's decisions_file; -: stdin"
    )
    parser.add_argument("--router", type=base_url, metavar="URL", help="a router's base URL, to ask instead")
    parser.add_argument(
        "--turn", default="", metavar="ID", help="the turn's X-Request-Id; in a file: only it"
    )
    parser.add_argument("--key", default="", help="the API key of the turn's tenant (--router)")
    add_common_flags(parser)
    parser.epilog = (
        "With --output json each decision is one line. Exit status: 0, 1 this version would decide otherwise, or "
        "the turn is not known there, 2 usage, 3 the router does not answer."
    )


def run(arguments: Namespace) -> int:
    """Explains. The exit status: 1 when a decision would be another one, or is not there."""
    return perform("explain", _explain, arguments)


async def _explain(arguments: Namespace) -> int:
    if bool(arguments.file) == bool(arguments.router) or (arguments.router and not arguments.turn):
        raise OperatorError("give FILE, or --router URL with --turn ID", Exit.USAGE)
    decisions = _from_file(arguments) if arguments.file else await _from_router(arguments)
    if not decisions:
        turn = f"of turn {arguments.turn!r} " if arguments.turn else ""
        raise not_found(f"{arguments.router or arguments.file} has no decision {turn}".rstrip())
    differ = False
    for decision in decisions:
        again = decision.again()
        differ = differ or not same(decision.plan, again)
        if arguments.output is Output.JSON:
            print(json.dumps(as_json(decision, again)))
        else:
            print("\n".join(lines(decision, again)))
    return Exit.PROBLEM if differ else Exit.OK


def same(recorded: Plan | None, again: Plan | None) -> bool:
    """Whether two plans say the same; predicted prices may differ by rounding."""
    if recorded is None or again is None:
        return recorded is again
    return _identity(recorded) == _identity(again)


def as_json(decision: Decision, again: Plan | None) -> dict[str, Any]:
    """The decision, its replay, and whether they agree."""
    return {
        "turn_id": decision.turn_id,
        "recorded": plan_to_json(decision.plan) if decision.plan else None,
        "decode_anew_id": decision.decode_anew_id,
        "served_by_id": decision.served_by_id,
        "again": plan_to_json(again) if again else None,
        "same": same(decision.plan, again),
    }


def lines(decision: Decision, again: Plan | None) -> list[str]:
    """The explanation for people."""
    signals, made = decision.signals, decision.plan
    lease = signals.lease
    if isinstance(lease, PlanReason):
        held = f"no lease ({lease.value})"
    else:
        held = f"a lease of {lease.tokens} tokens at {lease.engine_id}, {_suffix(lease)}"
    said = [f"turn {decision.turn_id}: about {signals.prompt_tokens} tokens, {held}"]
    if made is None:
        return [*said, "  no engine that decodes could take it"]
    said.append(f"  {made.path.value}, because {made.reason.value}: {_engines(made)}")
    said += _engines_after(decision, made.decode_engine_id)
    alone = made.reason is PlanReason.PREFILL_OVERLOADED
    for price in made.prices:
        mark = "→" if (price.path, price.alone) == (made.path, alone) else " "
        name = "decode alone" if price.alone else price.path.value
        said.append(
            f"  {mark} {name:12} {price.total_s * 1e3:9.1f} ms = wait {price.wait_s * 1e3:.1f}"
            f" + READ {price.read_s * 1e3:.1f} + compute {price.compute_s * 1e3:.1f}"
            f" + delay of others {price.delay_s * 1e3:.1f}"
        )
    if not made.prices and isinstance(lease, LeaseSignal):
        said.append("    by thresholds: not every rate was measured often enough")
    if not same(made, again):
        other = f"{again.path.value}, because {again.reason.value}: {_engines(again)}" if again else "nothing"
        said.append(f"  ! this version would decide: {other}")
    return said


def _suffix(lease: LeaseSignal) -> str:
    if lease.suffix_tokens is None:
        return "whose history was edited"
    return f"{lease.suffix_tokens} tokens after it"


def _engines(made: Plan) -> str:
    return (
        f"{made.prefill_engine_id} → {made.decode_engine_id}"
        if made.prefill_engine_id
        else made.decode_engine_id
    )


def _engines_after(decision: Decision, planned_id: str) -> list[str]:
    """The decode engines that were asked in place of the planned one, and why."""
    said: list[str] = []
    anew_id, served_id = decision.decode_anew_id, decision.served_by_id
    if anew_id:
        said.append(f"  decoded by {anew_id}, chosen anew when the prompt was computed")
    if served_id not in ("", anew_id or planned_id):
        said.append(f"  decoded by {served_id} in the end, in place of {anew_id or planned_id}")
    return said


def _identity(made: Plan) -> tuple[object, ...]:
    return made.path, made.reason, made.decode_engine_id, made.prefill_engine_id, made.keep


def _from_file(arguments: Namespace) -> list[Decision]:
    try:
        text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(str(error), Exit.USAGE) from error
    decisions: list[Decision] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            decision = Decision.from_json(json.loads(line))
        except ValueError as error:
            raise InvalidArgument(f"line {number} is no JSON") from error
        except InvalidArgument as error:
            raise InvalidArgument(f"line {number}: {error}") from error
        if arguments.turn in ("", decision.turn_id):
            decisions.append(decision)
    return decisions


async def _from_router(arguments: Namespace) -> list[Decision]:
    headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    url = f"{arguments.router}/v1/kvlease/decisions/{quote(arguments.turn, safe='')}"
    timeout = aiohttp.ClientTimeout(arguments.timeout_s)
    async with fleet(arguments) as ways:
        context = ways.tls.client_context() if ways.tls is not None else True
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url, headers=headers, ssl=context) as answer,
            ):
                status, raw = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            message = f"no answer from {arguments.router}: {type(error).__name__}"
            raise OperatorError(message, Exit.UNREACHABLE) from error
    return _decisions_of(arguments.router, status, raw)


def _decisions_of(router: str, status: int, raw: bytes) -> list[Decision]:
    try:
        body: Any = json.loads(raw)
        if status == 200:
            return [Decision.from_json(body)]
        error = body["error"]
        said, message = error["code"], error["message"]
    except (ValueError, LookupError, TypeError, InvalidArgument) as error:
        raise OperatorError(f"{router} answers {status}, but not as a router does", Exit.PROBLEM) from error
    if said == NOT_KEPT:
        return []
    raise OperatorError(f"{router} answers {status}: {message}", Exit.PROBLEM)
