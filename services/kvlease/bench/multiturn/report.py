"""What a run says: percentiles per mode, ratios between modes, charts, and two runs compared."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from kvlease.bench.multiturn.plan import Mode, TurnStats
from kvlease.core.errors import InvalidArgument

Key = tuple[str, int, int, int, int]
"""Source, turn, length, suffix, conversations: what is compared. A replay's turns have lengths of their own: 0."""

KEY_NAMES = ("source", "turn", "length", "suffix", "conversations")

SINGLE_PATHS = (Mode.OFF, Mode.ON, Mode.APPEND)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of values that are not empty."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(turns: Iterable[TurnStats]) -> list[dict[str, Any]]:
    """A row per mode and point of the sweep, or turn of the replay: TTFT, what moved, and the paths taken."""
    groups: dict[tuple[Key, Mode], list[TurnStats]] = defaultdict(list)
    for turn in turns:
        length, suffix = (0, 0) if turn.source else (turn.length, turn.suffix)
        groups[(turn.source, turn.turn, length, suffix, turn.conversations), turn.mode].append(turn)
    return [
        {
            "mode": mode.value,
            "source": key[0],
            "turn": key[1],
            "length": percentile([turn.length for turn in group], 0.5),
            "suffix": percentile([turn.suffix for turn in group], 0.5),
            "conversations": key[4],
            "turns": len(group),
            "ttft_p50_ms": median(turn.ttft_ms for turn in group),
            "ttft_p99_ms": percentile([turn.ttft_ms for turn in group], 0.99),
            "prefill_p50_ms": percentile([turn.prefill_ms for turn in group], 0.5),
            "read_p50_ms": percentile([turn.read_ms for turn in group], 0.5),
            "transfer_p50_ms": percentile([turn.transfer_ms for turn in group], 0.5),
            "bytes": percentile([turn.bytes for turn in group], 0.5),
            "descriptors": percentile([turn.descriptors for turn in group], 0.5),
            "reused_tokens": percentile([turn.reused_tokens for turn in group], 0.5),
            "paths": sorted({f"{turn.path}: {turn.reason}".rstrip(": ") for turn in group}),
        }
        for (key, mode), group in groups.items()
    ]


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
        if "on" in of and "off" in of:
            point["readback_to_recompute"] = round(of["on"] / of["off"], 3)
        found.append(point)
    return found


def _key(row: Mapping[str, Any]) -> Key:
    length, suffix = (0, 0) if row["source"] else (row["length"], row["suffix"])
    return row["source"], row["turn"], length, suffix, row["conversations"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary for a terminal."""
    head = (
        f"{'mode':8}{'turn':>6}{'prompt':>8}{'suffix':>8}{'at once':>8}"
        f"{'p50 ms':>10}{'p99 ms':>10}{'MiB read':>10}  path"
    )
    lines = [
        f"{row['mode']:8}{row['turn']:>6}{row['length']:>8}{row['suffix']:>8}{row['conversations']:>8}"
        f"{row['ttft_p50_ms']:>10.1f}{row['ttft_p99_ms']:>10.1f}{row['bytes'] / 2**20:>10.1f}"
        f"  {', '.join(row['paths'])}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Charts of TTFT by length, and of what a turn's time was spent on; `path` with .png and .svg.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidArgument("charts need matplotlib: pip install 'kvlease[bench]'") from error
    figure: Any = figures.Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    suffix = min(row["suffix"] for row in rows)
    single = [row for row in rows if row["conversations"] == 1 and row["suffix"] == suffix]
    for mode in Mode:
        points = sorted((row["length"], row["ttft_p50_ms"]) for row in single if row["mode"] == mode.value)
        if points:
            left.plot(*zip(*points, strict=True), "o-", label=mode.value)
    left.set(xlabel="tokens of the first prompt", ylabel="TTFT of turn two, ms (median)")
    left.set_title(f"suffix of {suffix} tokens")
    left.legend()
    longest = max((row["length"] for row in single), default=0)
    bars = [row for row in single if row["length"] == longest]
    names, bottom = [row["mode"] for row in bars], [0.0] * len(bars)
    for label, part in _parts(bars).items():
        right.bar(names, part, bottom=bottom, label=label)
        bottom = [below + more for below, more in zip(bottom, part, strict=True)]
    right.set(ylabel="ms", title=f"turn two after {longest} tokens")
    right.legend()
    for ending in (".png", ".svg"):
        figure.savefig(path.with_suffix(ending), dpi=120)


def _parts(bars: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What the medians of turns were spent on, in ms. A stock engine does not tell its READ from its prefill."""
    read = [min(row["read_p50_ms"], row["prefill_p50_ms"]) for row in bars]
    prefill = [row["prefill_p50_ms"] - own for row, own in zip(bars, read, strict=True)]
    rest = [row["ttft_p50_ms"] - row["prefill_p50_ms"] for row in bars]
    return {"READ by the prefill engine": read, "prefill leg": prefill, "decode leg, its READ, hops": rest}


def compared(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points that two summaries share, with the second's TTFT over the first's."""

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
        }
        for point, row in first.items()
        if point in second
    ]
