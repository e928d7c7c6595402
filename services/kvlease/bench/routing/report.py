"""The figures of `kvlease bench routing`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlease.bench.routing.fleet import Fleet
from kvlease.bench.routing.policies import OURS, POLICIES, Policy
from kvlease.bench.routing.replay import Replay, Turn
from kvlease.bench.trace import Visit
from kvlease.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy made of a trace at one load.

    Attributes:
        ttft_s: mean, median and 99th percentile of the time to the first token.
        turn_s: mean and 99th percentile of the time to the last token.
        token_s: mean and 99th percentile, over turns, of the mean time from one token to the next.
        reused: share of all prompt tokens that nobody computed again.
        paths: turns by their path and its reason.
    """

    ttft_s: tuple[float, float, float]
    turn_s: tuple[float, float]
    token_s: tuple[float, float]
    reused: float
    paths: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        """The figures as an object."""
        mean_s, median_s, slow_s = self.ttft_s
        return {
            "ttft_mean_s": round(mean_s, 3),
            "ttft_p50_s": round(median_s, 3),
            "ttft_p99_s": round(slow_s, 3),
            "turn_mean_s": round(self.turn_s[0], 3),
            "turn_p99_s": round(self.turn_s[1], 3),
            "between_tokens_mean_ms": round(self.token_s[0] * 1e3, 2),
            "between_tokens_p99_ms": round(self.token_s[1] * 1e3, 2),
            "reused_share": round(self.reused, 4),
            "turns": dict(self.paths),
        }


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Figures by load and by name of the policy."""

    fleet: Fleet
    requests: int
    figures: Mapping[float, Mapping[str, Figures]]

    def goals(self) -> dict[str, bool]:
        """Whether ours is nowhere beaten."""
        return {
            f"load {load:g}: {name} of ours at most that of {other}": ours.ttft_s[at] <= theirs.ttft_s[at]
            for load, of_load in self.figures.items()
            for ours in (of_load[OURS.name],)
            for other, theirs in of_load.items()
            if other != OURS.name
            for at, name in ((0, "mean"), (2, "p99"))
        }

    def to_json(self) -> dict[str, object]:
        """The figures as a document."""
        return {
            "requests": self.requests,
            "engines": f"{self.fleet.prefills} prefill and {self.fleet.decodes} decode engines",
            "capacity_prompt_tokens_per_s": round(self.fleet.prompt_tokens_per_s),
            "results": [
                {"load": load, "policy": name, **figures.to_json()}
                for load, of_load in self.figures.items()
                for name, figures in of_load.items()
            ],
            "goals": self.goals(),
        }

    def table(self) -> str:
        """The figures for a terminal."""
        head = (
            f"{'load':>5} {'policy':14} {'mean':>10} {'p50':>10} {'p99':>10}  {'whole turn':>10}"
            f"  {'reused':>7}  {'between tokens':>14}"
        )
        lines = [head]
        for load, of_load in self.figures.items():
            for name, one in of_load.items():
                times = " ".join(f"{seconds:8.3f} s" for seconds in one.ttft_s)
                lines.append(
                    f"{load:5g} {name:14} {times}  {one.turn_s[0]:8.3f} s"
                    f"  {one.reused:7.1%}  {one.token_s[0] * 1e3:11.1f} ms"
                )
        lines.append("")
        lines += [f"{'met' if met else 'NOT MET':8} {goal}" for goal, met in self.goals().items()]
        return "\n".join(lines)


def measure(
    visits: Sequence[Visit],
    loads: Sequence[float],
    fleet: Fleet = Fleet(),  # noqa: B008 (frozen)
    policies: Sequence[Policy] = POLICIES,
) -> RoutingReport:
    """Replays a trace under every policy at every load.

    A load is the share of the fleet's capacity that the prompts' tokens ask for on average when nothing is reused;
    times between requests are stretched or shortened to that.

    Raises:
        InvalidArgument: all requests of the trace come at once.
    """
    seconds = visits[-1].at_s - visits[0].at_s
    if seconds <= 0:
        raise InvalidArgument("the requests of the trace come at one moment, which is no load")
    asked_per_s = sum(visit.prompt_tokens for visit in visits) / seconds
    return RoutingReport(
        fleet,
        len(visits),
        {
            load: {
                policy.name: _figures(
                    Replay(fleet, visits, policy, asked_per_s / (load * fleet.prompt_tokens_per_s)).run()
                )
                for policy in policies
            }
            for load in loads
        },
    )


def _figures(turns: Sequence[Turn]) -> Figures:
    ttfts_s = sorted(turn.first_s - turn.came_s for turn in turns)
    turns_s = sorted(turn.ended_s - turn.came_s for turn in turns)
    tokens_s = sorted(turn.between_tokens_s for turn in turns if turn.later_tokens)
    prompts = sum(turn.visit.prompt_tokens for turn in turns)
    paths = Counter(f"{turn.plan.path.value}; {turn.plan.reason.value}" for turn in turns)
    return Figures(
        (_mean(ttfts_s), _quantile(ttfts_s, 0.5), _quantile(ttfts_s, 0.99)),
        (_mean(turns_s), _quantile(turns_s, 0.99)),
        (_mean(tokens_s), _quantile(tokens_s, 0.99)),
        sum(turn.reused_tokens for turn in turns) / max(1, prompts),
        dict(sorted(paths.items())),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
