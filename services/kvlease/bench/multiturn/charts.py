"""The publication's two charts of a run: TTFT by length, and the prefill leg split in computing and transfer."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kvlease.bench.multiturn.plan import Mode
from kvlease.core.errors import InvalidArgument

ENDINGS = (".png", ".svg")
BARS_WIDTH = 0.8
"""Of the bars of one length together, where lengths are 1 apart."""


def figure_module() -> Any:
    """matplotlib's figures.

    Raises:
        InvalidArgument: it is not installed.
    """
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidArgument("charts need matplotlib: pip install 'kvlease[bench]'") from error


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the rows of a sweep's summary; `path` with .png and .svg.

    Of points with other suffixes, more conversations at once or think times only the least is drawn.

    Raises:
        InvalidArgument: matplotlib is not installed, or there is no row.
    """
    drawn = _least(rows)
    figure: Any = figure_module().Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _ttft(left, drawn)
    _prefill(right, drawn)
    point = drawn[0]
    figure.suptitle(
        f"turn two: suffix of {point['suffix']} tokens, {point['conversations']} at once, "
        f"up to {max(row['turns'] for row in drawn)} turns a point"
    )
    for ending in ENDINGS:
        figure.savefig(path.with_suffix(ending), dpi=120)


def prefill_split(row: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds of the prefill leg that went to computing, queues and hops, and to its READ over NIXL.

    Records from before NIXL's times were kept by role have the connector's, for kvlease alone.
    """
    transfer = min(row["prefill_transfer_p50_ms"] or row["read_p50_ms"], row["prefill_p50_ms"])
    return row["prefill_p50_ms"] - transfer, transfer


def _least(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    def point(row: Mapping[str, Any]) -> tuple[int, float, int]:
        return row["conversations"], row["think_s"], row["suffix"]

    if not rows:
        raise InvalidArgument("charts: nothing was measured")
    least = min(map(point, rows))
    return sorted((row for row in rows if point(row) == least), key=lambda row: row["length"])


def _ttft(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for mode in Mode:
        points = [(row["length"], row["ttft_p50_ms"]) for row in rows if row["mode"] == mode.value]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=_colour(mode), label=mode.value)
    axes.set(xlabel="tokens of the first prompt", ylabel="TTFT, ms (median)", title="time to the first token")
    axes.set_ylim(bottom=0)
    axes.legend()


def _prefill(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """A bar per length and mode with a prefill leg."""
    legs = [row for row in rows if row["prefill_p50_ms"]]
    lengths = sorted({row["length"] for row in legs})
    modes = [mode.value for mode in Mode if any(row["mode"] == mode.value for row in legs)]
    width = BARS_WIDTH / max(1, len(modes))
    for number, mode in enumerate(modes):
        bars = [row for row in legs if row["mode"] == mode]
        places = [lengths.index(row["length"]) + (number - (len(modes) - 1) / 2) * width for row in bars]
        computing, transfer = zip(*map(prefill_split, bars), strict=True)
        axes.bar(places, computing, width, color=_colour(mode), label=f"{mode}: prefill")
        if any(transfer):
            look = {"color": _colour(mode), "alpha": 0.4, "hatch": "//", "label": f"{mode}: KV transfer"}
            axes.bar(places, transfer, width, bottom=computing, **look)
    axes.set(xlabel="tokens of the first prompt", ylabel="ms (median)", title="prefill leg")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    if legs:
        axes.legend()


def _colour(mode: str) -> str:
    """The same in both charts."""
    return f"C{list(Mode).index(Mode(mode))}"
