"""What keeping conversations alive costs and brings on a trace: fixed times against the predicted gap.

    python -m tests.bench.gap_policy TRACE --output docs/benchmarks/DATE-gap-policy.json

A line of the trace is a request: `timestamp` in ms, `input_length`, `output_length` in tokens, `hash_ids`, the prefix
hashes of 512-token blocks. It names no conversations: a request continues the latest one that has its longest known
prefix, if they share more than one block, and the gap is the time between the two. Everything counts as one tenant.
A kept request is let go when it is continued, when its time has passed, or when the trace ends.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvlease.core.gaps import OWN_GAPS_MAX, GapEstimator, GapPolicy

BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 256 << 10
GIB = 1 << 30

KeepFor = Callable[[Sequence[float]], float]
"""Seconds for which a request is kept, from its conversation's gaps so far."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a trace.

    Attributes:
        parent: index of the request that it continues, -1 without one.
        shared_tokens: of the prefix that they share.
    """

    at_s: float
    tokens: int
    parent: int
    shared_tokens: int


@dataclass(slots=True)
class Kept:
    """What is kept of a request, and its conversation's gaps."""

    until_s: float
    gaps_s: tuple[float, ...]
    let_go: bool = False


@dataclass(slots=True)
class Result:
    """What a policy cost and brought."""

    requests: int = 0
    hits: int = 0
    continued: int = 0
    reused_tokens: int = 0
    held_s: float = 0.0
    held_gib_s: float = 0.0


def read_trace(lines: Iterable[str]) -> list[Visit]:
    """The requests of a trace, each with the one that it continues."""
    owner_of_prefix: dict[int, int] = {}
    visits: list[Visit] = []
    for line in lines:
        request = json.loads(line)
        prefixes: list[int] = request["hash_ids"]
        shared = next((n for n in range(len(prefixes), 1, -1) if prefixes[n - 1] in owner_of_prefix), 0)
        parent = owner_of_prefix[prefixes[shared - 1]] if shared else -1
        tokens = request["input_length"] + request["output_length"]
        shared_tokens = min(shared * BLOCK_TOKENS, request["input_length"])
        owner_of_prefix |= dict.fromkeys(prefixes, len(visits))
        visits.append(Visit(request["timestamp"] / 1e3, tokens, parent, shared_tokens))
    return visits


def replay(
    visits: Sequence[Visit], keep_for: KeepFor, observe: Callable[[float], None], from_s: float = 0.0
) -> Result:
    """Runs a policy over a trace in order of time; it learns of a gap when the gap has ended.

    Counts what is kept of the requests that come from `from_s` on, and their continuations.
    """
    result, kept = Result(), list[Kept]()
    for visit in visits:
        gaps_s: tuple[float, ...] = ()
        if visit.parent >= 0:
            parent, earlier = visits[visit.parent], kept[visit.parent]
            gap_s = visit.at_s - parent.at_s
            if parent.at_s >= from_s:
                _continue(result, visit, earlier)
                _let_go(result, parent, earlier, visit.at_s)
            observe(gap_s)
            gaps_s = (*earlier.gaps_s, gap_s)[-OWN_GAPS_MAX:]
        kept.append(Kept(visit.at_s + keep_for(gaps_s), gaps_s))
    for visit, held in zip(visits, kept, strict=True):
        if visit.at_s >= from_s:
            result.requests += 1
            _let_go(result, visit, held, visits[-1].at_s)
    return result


def _continue(result: Result, visit: Visit, earlier: Kept) -> None:
    result.continued += 1
    if visit.at_s <= earlier.until_s:
        result.hits += 1
        result.reused_tokens += visit.shared_tokens


def _let_go(result: Result, visit: Visit, held: Kept, now_s: float) -> None:
    if not held.let_go:
        held.let_go = True
        seconds = min(now_s, held.until_s) - visit.at_s
        result.held_s += seconds
        result.held_gib_s += seconds * visit.tokens * BYTES_PER_TOKEN / GIB


def compare(
    visits: Sequence[Visit], quantiles: Sequence[float], from_s: float
) -> dict[str, dict[str, float]]:
    """Figures by policy, of the requests from `from_s` on."""
    figures: dict[str, dict[str, float]] = {}
    for seconds in (30.0, 120.0, 480.0, 600.0):
        name = "floor only, 30 s" if seconds == GapPolicy().floor_s else f"fixed {seconds:g} s"
        figures[name] = _figures(replay(visits, _always(seconds), lambda _: None, from_s))
    for quantile in quantiles:
        estimator = GapEstimator(GapPolicy(quantile))
        predict, observe = partial(estimator.predict_s, "all"), partial(estimator.observe, "all")
        figures[f"predicted quantile {quantile:g}"] = _figures(replay(visits, predict, observe, from_s))
    return figures


def _always(seconds: float) -> KeepFor:
    return lambda _: seconds


def _figures(result: Result) -> dict[str, float]:
    return {
        "hit_rate": round(result.hits / max(1, result.continued), 4),
        "reused_tokens": result.reused_tokens,
        "held_s_a_request": round(result.held_s / max(1, result.requests), 1),
        "held_gib_s": round(result.held_gib_s),
    }


def main() -> None:
    """Reads the trace and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--quantiles", type=float, nargs="+", default=[0.5, 0.75, 0.9, 0.95])
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with arguments.trace.open() as lines:
        visits = read_trace(lines)
    report = {
        "what": "keeping conversations alive after a turn: hit rate of the turns that continue one, against held time",
        "command": f"python -m tests.bench.gap_policy {arguments.trace.name}",
        "trace": arguments.trace.name,
        "requests": len(visits),
        "continuing_requests": sum(visit.parent >= 0 for visit in visits),
        "bytes_per_token": BYTES_PER_TOKEN,
        "whole_trace": compare(visits, arguments.quantiles, 0.0),
        "second_half": compare(visits, arguments.quantiles, visits[-1].at_s / 2),
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
