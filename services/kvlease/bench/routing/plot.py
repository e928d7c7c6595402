"""The plot of `kvlease bench routing`: the time to the first token against the load, by policy."""

from importlib import import_module
from pathlib import Path
from typing import Any

from kvlease.bench.routing.policies import OURS
from kvlease.bench.routing.report import RoutingReport
from kvlease.core.errors import InvalidArgument


def plot(report: RoutingReport, path: Path) -> None:
    """Writes `path` with the suffix .png.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
    except ImportError as error:
        raise InvalidArgument("plots need matplotlib: pip install 'kvlease[bench]'") from error
    figure: Any = figures.Figure(figsize=(12, 5), layout="constrained")
    loads = list(report.figures)
    for axes, at, title in zip(figure.subplots(1, 2), (0, 2), ("mean", "99th percentile"), strict=True):
        for name in next(iter(report.figures.values())):
            ttfts_s = [of_load[name].ttft_s[at] for of_load in report.figures.values()]
            axes.plot(loads, ttfts_s, "s-" if name == OURS.name else "o--", label=name)
        axes.set(xlabel="load, share of what prefill engines can compute", title=title)
        axes.set(ylabel="time to the first token, s", yscale="log", xticks=loads)
        axes.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)
