"""The record of a run, and what is said while it goes on."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlease.bench.multiturn.plan import Cell, Mode, TurnStats
from kvlease.bench.multiturn.replay import ReplayCell
from kvlease.bench.multiturn.report import percentile, ratios, summary
from kvlease.core.errors import InvalidArgument

AnyCell = Cell | ReplayCell


class Record:
    """The JSON file of a run. Every turn is kept; percentiles are taken from them.

    Args:
        path: None keeps it in memory.

    Raises:
        InvalidArgument: there is a file already and it is not to be resumed, or it cannot be read.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self.about: dict[str, Any] = {}
        self.turns: list[TurnStats] = []
        self.streams: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        if not resume:
            raise InvalidArgument(f"{path} exists; --resume goes on from it")
        self.turns, self.streams = read_record(path)

    @property
    def done(self) -> set[str]:
        """Names of the cells that were measured."""
        return {turn.cell for turn in self.turns}

    def add(self, turns: list[TurnStats]) -> None:
        """Keeps a cell."""
        self.turns += turns
        self._write()

    def add_streams(self, row: dict[str, Any]) -> None:
        """Keeps the times between tokens of one mode."""
        self.streams.append(row)
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        rows = summary(self.turns)
        document = {
            **self.about,
            "summary": rows,
            "ratios": ratios(rows),
            "streams": self.streams,
            "turns": [asdict(turn) for turn in self.turns],
        }
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(self._path)


def read_record(path: Path) -> tuple[list[TurnStats], list[dict[str, Any]]]:
    """The turns and the streams of a record.

    Raises:
        InvalidArgument: it is not one.
    """
    try:
        document = json.loads(path.read_text())
        turns = [_turn(**turn) for turn in document["turns"]]
        return turns, list(document.get("streams", ()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"{path} is no record of this benchmark: {error}") from error


def _turn(*, mode: str, **figures: Any) -> TurnStats:
    return TurnStats(mode=Mode(mode), **figures)


class Progress:
    """Says on stderr what was measured, with a bar."""

    def __init__(self, cells: int) -> None:
        self._cells = cells
        self._done = 0

    def say(self, text: str) -> None:
        """A line."""
        print(text, file=sys.stderr, flush=True)

    def step(self, cell: AnyCell, turns: list[TurnStats]) -> None:
        """A cell that was measured."""
        self._done += 1
        filled = 20 * self._done // self._cells
        took = percentile([turn.ttft_ms for turn in turns], 0.5)
        bar = "#" * filled + "." * (20 - filled)
        self.say(f"[{bar}] {self._done}/{self._cells} {cell.name}: {took:.1f} ms by {turns[0].path}")
