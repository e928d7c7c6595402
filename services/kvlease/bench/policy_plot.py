"""The plot of `kvlease bench policy`: reuse against what is kept, and against a budget."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlease.bench.bounds import tokens_at_most
from kvlease.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kvlease.bench.policy import PolicyReport

MILLION = 1e6


def plot(report: "PolicyReport", path: Path) -> None:
    """Writes `path` with the suffixes .png and .svg.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidArgument("plots need matplotlib: pip install 'kvlease[bench]'") from error
    figure: Any = figures.Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _unlimited(left, report)
    _budgets(right, report)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)


def _unlimited(axes: Any, report: "PolicyReport") -> None:
    fixed = [(cost.held_gib_s, cost.reused_tokens) for cost in report.fixed.values()]
    ours = sorted((cost.held_gib_s, cost.reused_tokens) for cost in report.ours.values())
    most = max(held for held, _ in fixed)
    grid = [most * number / 200 for number in range(201)]
    axes.plot(
        grid, [tokens_at_most(report.offers, held) / MILLION for held in grid], "k:", label="clairvoyant"
    )
    axes.plot(*_scaled(fixed), "o-", color="tab:gray", label="fixed time")
    for seconds, (held, reused) in zip(report.fixed, fixed, strict=True):
        axes.annotate(f"{seconds:g} s", (held, reused / MILLION), textcoords="offset points", xytext=(4, -11))
    axes.plot(*_scaled(ours), "s-", color="tab:blue", label="ours")
    axes.set(
        xlabel="GiB and seconds kept", ylabel="reused prefill tokens, millions", title="unlimited memory"
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _budgets(axes: Any, report: "PolicyReport") -> None:
    rows = list(report.budgets.items())
    gib = [budget for budget, _ in rows]
    axes.plot(gib, [row.bound / MILLION for _, row in rows], "k:", label="clairvoyant, at most")
    for seconds in rows[0][1].fixed if rows else ():
        reused = [row.fixed[seconds] / MILLION for _, row in rows]
        axes.plot(gib, reused, "o--", alpha=0.6, label=f"fixed {seconds:g} s, not evictable")
    axes.plot(gib, [row.lru / MILLION for _, row in rows], "^-", color="tab:red", label="least recently used")
    axes.plot(gib, [row.ours / MILLION for _, row in rows], "s-", color="tab:blue", label="ours")
    axes.set(xlabel="budget, GiB", title="within a budget")
    axes.set_xscale("log")
    axes.set_xticks(gib, [f"{budget:g}" for budget in gib])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _scaled(points: list[tuple[float, int]]) -> tuple[list[float], list[float]]:
    return [held for held, _ in points], [reused / MILLION for _, reused in points]
