"""`kvlease explain`: makes a recorded decision again, and says what each path would have cost."""

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import aiohttp

from kvlease.core.decisions import Decision, plan_to_json
from kvlease.core.errors import InvalidArgument
from kvlease.core.planning import LeaseSignal, Plan, PlanReason

TIMEOUT_S = 10.0


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease explain`."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="lines of a router's decisions_file; -: stdin"
    )
    parser.add_argument("--router", metavar="URL", help="a router's base URL, to ask instead")
    parser.add_argument(
        "--turn", default="", metavar="ID", help="the turn's X-Request-Id; in a file: only it"
    )
    parser.add_argument("--key", default="", help="the API key of the turn's tenant (--router)")
    parser.add_argument("--output", choices=("text", "json"), default="text", help="how to show it")
    parser.epilog = (
        "Exit status: 0, 1 this version would decide otherwise, 2 usage or no decision, "
        "3 the router does not answer."
    )


def run(arguments: Namespace) -> int:
    """Explains. The exit status."""
    if bool(arguments.file) == bool(arguments.router) or (arguments.router and not arguments.turn):
        print("kvlease explain: give FILE, or --router URL with --turn ID", file=sys.stderr)
        return 2
    try:
        decisions = _from_file(arguments) if arguments.file else asyncio.run(_from_router(arguments))
    # First: aiohttp's errors of connections are OSErrors, too.
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"kvlease explain: no answer from {arguments.router}: {type(error).__name__}", file=sys.stderr)
        return 3
    except (InvalidArgument, OSError, UnicodeDecodeError) as error:
        print(f"kvlease explain: {error}", file=sys.stderr)
        return 2
    if not decisions:
        print("kvlease explain: no such decision", file=sys.stderr)
        return 2
    differ = False
    for decision in decisions:
        again = decision.again()
        differ = differ or not same(decision.plan, again)
        if arguments.output == "json":
            print(json.dumps(as_json(decision, again)))
        else:
            print("\n".join(lines(decision, again)))
    return 1 if differ else 0


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
    for price in made.prices:
        mark = "→" if price.path is made.path else " "
        said.append(
            f"  {mark} {price.path.value:9} {price.total_s * 1e3:9.1f} ms = wait {price.wait_s * 1e3:.1f}"
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


def _identity(made: Plan) -> tuple[object, ...]:
    return made.path, made.reason, made.decode_engine_id, made.prefill_engine_id, made.keep


def _from_file(arguments: Namespace) -> list[Decision]:
    text = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
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
    url = f"{arguments.router.rstrip('/')}/v1/kvlease/decisions/{arguments.turn}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as answer:
        if answer.status == 404:
            return []
        answer.raise_for_status()
        return [Decision.from_json(await answer.json())]
