"""What a run says: percentiles per mode, ratios between modes, what is at most possible, and two runs compared."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from kvlease.bench.multiturn.plan import Mode, TurnStats

Key = tuple[str, int, bool, int, int, int, float]
"""What is compared. A replay's turns have lengths of their own: 0. Its last turns are apart, since of stock engines
those alone are measured, so that both sides of a ratio are turns of the same conversations."""

KEY_NAMES = ("source", "turn", "last", "length", "suffix", "conversations", "think_s")

READING = (Mode.ON, Mode.AUTO, Mode.STOCK)
SINGLE_PATHS = (Mode.OFF, Mode.ON, Mode.APPEND)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of values that are not empty."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(turns: Iterable[TurnStats]) -> list[dict[str, Any]]:
    """A row per mode and point of the sweep, or turn of the replay: TTFT, its parts, what moved, the paths taken."""
    groups: dict[tuple[Key, Mode], list[TurnStats]] = defaultdict(list)
    for turn in turns:
        length, suffix = (0, 0) if turn.source else (turn.length, turn.suffix)
        key = (turn.source, turn.turn, turn.last, length, suffix, turn.conversations, turn.think_s)
        groups[key, turn.mode].append(turn)
    return [_row(key, mode, group) for (key, mode), group in groups.items()]


def _row(key: Key, mode: Mode, turns: Sequence[TurnStats]) -> dict[str, Any]:
    ttfts = [turn.ttft_ms for turn in turns]

    def middle(figure: Callable[[TurnStats], float]) -> float:
        return median(map(figure, turns))

    return {
        "mode": mode.value,
        "source": key[0],
        "turn": key[1],
        "last": key[2],
        # The middle one of a replay's, which differ.
        "length": percentile([turn.length for turn in turns], 0.5),
        "suffix": percentile([turn.suffix for turn in turns], 0.5),
        "conversations": key[5],
        "think_s": key[6],
        "turns": len(turns),
        "ttft_mean_ms": fmean(ttfts),
        "ttft_p50_ms": median(ttfts),
        "ttft_p90_ms": percentile(ttfts, 0.9),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "prefill_p50_ms": middle(lambda turn: turn.prefill_ms),
        "rest_p50_ms": middle(lambda turn: turn.ttft_ms - turn.prefill_ms),
        "read_p50_ms": middle(lambda turn: turn.read_ms),
        "prefill_transfer_p50_ms": middle(lambda turn: turn.prefill_transfer_ms),
        "transfer_p50_ms": middle(lambda turn: turn.transfer_ms),
        "bytes": middle(lambda turn: turn.bytes),
        "prefill_bytes": middle(lambda turn: turn.prefill_bytes),
        "descriptors": middle(lambda turn: turn.descriptors),
        "reused_tokens": middle(lambda turn: turn.reused_tokens),
        "paths": dict(Counter(f"{turn.path}: {turn.reason}".rstrip(": ") for turn in turns)),
    }


def strays(turns: Iterable[TurnStats]) -> dict[str, int]:
    """Turns of a sweep that did not take the path that their mode is to measure, by mode and the path taken.

    A replay's are left out: its first turns, and short ones, have another path by right.
    """
    return dict(
        Counter(
            f"{turn.mode} by {turn.path}"
            for turn in turns
            if not turn.source and turn.mode.path not in ("", turn.path)
        )
    )


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per point: AUTO and readback beside stock's readback, and AUTO beside the best single path."""
    medians: dict[Key, dict[str, float]] = defaultdict(dict)
    for row in rows:
        medians[_key(row)][row["mode"]] = row["ttft_p50_ms"]
    found: list[dict[str, Any]] = []
    for key, of in medians.items():
        singles = [of[mode] for mode in SINGLE_PATHS if mode in of]
        point: dict[str, Any] = dict(zip(KEY_NAMES, key, strict=True))
        if "auto" in of and "stock" in of:
            point["auto_to_stock"] = round(of["auto"] / of["stock"], 3)
        if "on" in of and "stock" in of:
            point["readback_to_stock"] = round(of["on"] / of["stock"], 3)
        if "auto" in of and singles:
            point["auto_to_best_path"] = round(of["auto"] / min(singles), 3)
        for mode, name in (("on", "readback"), ("stock", "stock"), ("auto", "auto")):
            if mode in of and "off" in of:
                point[f"{name}_to_recompute"] = round(of[mode] / of["off"], 3)
        found.append(point)
    return found


def limits(rows: Sequence[Mapping[str, Any]], link_gb_s: float) -> list[dict[str, Any]]:
    """How far each mode that reads back is from the least that it could take.

    That is the time in which the decode engine, which has all of the prefix, computes the suffix (APPEND of the
    same point), and the bytes that the mode READ at the link's rate. Points without APPEND have none.

    Args:
        link_gb_s: what the link carries, in 10^9 bytes per second.
    """
    appended = {_key(row): row["ttft_p50_ms"] for row in rows if row["mode"] == Mode.APPEND}
    found: list[dict[str, Any]] = []
    for row in rows:
        suffix_ms = appended.get(_key(row))
        if suffix_ms is None or not row["bytes"] or row["mode"] not in READING:
            continue
        link_ms = row["bytes"] / link_gb_s / 1e6
        found.append(
            {
                "mode": row["mode"],
                **dict(zip(KEY_NAMES, _key(row), strict=True)),
                "suffix_ms": suffix_ms,
                "link_ms": link_ms,
                "limit_ms": suffix_ms + link_ms,
                "ttft_to_limit": round(row["ttft_p50_ms"] / (suffix_ms + link_ms), 3),
            }
        )
    return found


def _key(row: Mapping[str, Any]) -> Key:
    length, suffix = (0, 0) if row["source"] else (row["length"], row["suffix"])
    return row["source"], row["turn"], row["last"], length, suffix, row["conversations"], row["think_s"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary for a terminal."""
    head = f"{_POINT_HEAD}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'prefill':>10}{'MiB read':>10}  paths"
    lines = [
        f"{_point(row)}{row['ttft_p50_ms']:>10.1f}{row['ttft_p90_ms']:>10.1f}{row['ttft_p99_ms']:>10.1f}"
        f"{row['prefill_p50_ms']:>10.1f}{row['bytes'] / 2**20:>10.1f}"
        f"  {', '.join(f'{path} ({count})' for path, count in row['paths'].items())}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def compared_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What `compared` found, for a terminal."""
    head = f"{_POINT_HEAD}{'first ms':>10}{'second ms':>10}{'ratio':>8}{'p99':>8}"
    lines = [
        f"{_point(row)}{row['first_p50_ms']:>10.1f}{row['second_p50_ms']:>10.1f}"
        f"{row['ratio']:>8.3f}{row['p99_ratio']:>8.3f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


_POINT_HEAD = f"{'mode':8}{'turn':>6}{'prompt':>8}{'suffix':>8}{'at once':>8}{'think s':>8}"


def _point(row: Mapping[str, Any]) -> str:
    turn = f"{row['turn']}{'.' if row['last'] else ''}"
    return (
        f"{row['mode']:8}{turn:>6}{row['length']:>8}{row['suffix']:>8}{row['conversations']:>8}"
        f"{row['think_s']:>8g}"
    )


def compared(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points that two summaries share, with the second's TTFT over the first's, of medians and 99th percentiles."""

    def by_point(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, Key], Mapping[str, Any]]:
        return {(row["mode"], _key(row)): row for row in rows}

    first, second = by_point(one), by_point(other)
    return [
        {
            "mode": row["mode"],
            **{name: row[name] for name in KEY_NAMES},
            "first_p50_ms": row["ttft_p50_ms"],
            "second_p50_ms": second[point]["ttft_p50_ms"],
            "ratio": round(second[point]["ttft_p50_ms"] / row["ttft_p50_ms"], 3),
            "first_p99_ms": row["ttft_p99_ms"],
            "second_p99_ms": second[point]["ttft_p99_ms"],
            "p99_ratio": round(second[point]["ttft_p99_ms"] / row["ttft_p99_ms"], 3),
        }
        for point, row in first.items()
        if point in second
    ]
