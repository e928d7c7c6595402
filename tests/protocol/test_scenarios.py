"""Stories of a lease, a line per event: `time  event | what the table says`. Each file in `scenarios/` is one."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvlease.core.holding import Grant, Hold, HoldLimits, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind, LeaseState, MissReason

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@dataclass
class Story:
    """A table of holds, and what it said last."""

    table: HoldTable = field(default_factory=lambda: HoldTable(Holder("e", "b", 1), HoldLimits(1000)))
    states: dict[int, LeaseState] = field(default_factory=dict)
    miss: MissReason | None = None

    def happen(self, now_s: float, words: list[str]) -> list[str]:
        """Lets one event happen; what can be said of the table after it."""
        self.miss = None
        verb, rest = words[0], words[1:]
        getattr(self, verb)(now_s, *rest)
        self.table.advance(now_s)
        self.states |= {event.lease_id: event.state for event in self.table.take_events()}
        said = [f"{lease_id} {state.value}" for lease_id, state in self.states.items()]
        said += [f"freed {hold.grant.lease_id}" for hold in self.table.take_ended()]
        return [*said, f"miss {self.miss.value}"] if self.miss else said

    def tick(self, now_s: float) -> None:
        self.table.advance(now_s)

    def grant(self, now_s: float, lease: str, _for: str, duration: str, *over: str) -> None:
        supersedes = int(over[1]) if over else 0
        grant = _grant(int(lease), LeaseKind.CONVERSATION, supersedes)
        assert self.table.grant(now_s, grant, float(duration), provisional=bool(over))

    def transfer(self, now_s: float, lease: str, _under: str, pin: str, _for: str, duration: str) -> None:
        grant = _grant(int(lease), LeaseKind.TRANSFER, 0)
        assert self.table.grant_transfer(now_s, grant, pin, float(duration))

    def renew(self, now_s: float, lease: str, _for: str, duration: str) -> None:
        self.miss = self.table.renew(now_s, [int(lease)], float(duration)).get(int(lease))

    def pin(self, now_s: float, lease: str, pin: str, part: str, duration: str) -> None:
        parts = {"reservation_s" if part == "reservation" else "read_part_s": float(duration)}
        answer = self.table.pin(now_s, PinAsk(int(lease), pin, Holder("e", "b"), "", **parts))
        self.miss = None if isinstance(answer, Hold) else answer

    def unpin(self, now_s: float, lease: str, pin: str) -> None:
        self.table.unpin(now_s, int(lease), pin)

    def release(self, now_s: float, lease: str) -> None:
        self.miss = self.table.end(now_s, int(lease), LeaseEvent.RELEASE)

    def reset(self, now_s: float) -> None:
        self.table.reset(now_s)


def _grant(lease_id: int, kind: LeaseKind, supersedes: int) -> Grant:
    return Grant(lease_id, kind, (lease_id,), b"d" * 16, 16, 16, supersedes=supersedes)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_story_goes_as_it_is_told(path: Path) -> None:
    story = Story()
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        event, expected = line.split("|")
        now_s, *words = event.split()
        said = story.happen(float(now_s), words)
        told = [part.strip() for part in expected.split(",")]
        assert set(told) <= set(said), line
        for kind in ("freed", "miss"):
            assert {part for part in said if part.startswith(kind)} <= set(told), line


def test_there_are_stories() -> None:
    assert len(SCENARIOS) >= 5
