"""The record of a run, and what is said while it goes on."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from kvlease.bench.multiturn.plan import Cell, Mode, TurnStats
from kvlease.bench.multiturn.replay import ReplayCell
from kvlease.bench.multiturn.report import limits, percentile, ratios, summary
from kvlease.core.errors import InvalidArgument

AnyCell = Cell | ReplayCell


class Record:
    """The JSON file of one or several runs with the same settings. Every turn is kept; percentiles are of them.

    Args:
        path: None keeps it in memory.
        link_gb_s: what the link between the engines carries; None: not known.

    Raises:
        InvalidArgument: there is a file already and it is not to be resumed, it cannot be read, or none can be
            written there.
    """

    def __init__(self, path: Path | None, resume: bool, link_gb_s: float | None = None) -> None:
        self._path = path
        self._link_gb_s = link_gb_s
        self.turns: list[TurnStats] = []
        self.streams: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.runs: list[dict[str, Any]] = []
        if path is None:
            if resume:
                raise InvalidArgument("--resume needs --output, the record to go on from")
            return
        require_writable(path)
        if not path.exists():
            return
        if not resume:
            raise InvalidArgument(f"{path} exists; --resume goes on from it")
        document = read_record(path)
        self.turns, self.streams = document["turns"], document.get("streams", [])
        self.settings, self.runs = document.get("settings", {}), document.get("runs", [])

    @property
    def done(self) -> set[str]:
        """Names of the cells that were measured."""
        return {turn.cell for turn in self.turns}

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Keeps what holds for every turn of the record.

        Raises:
            InvalidArgument: earlier turns were measured with something else; the message has both values.
        """
        for name, value in settings.items():
            was = self.settings.get(name, value)
            if was != value:
                raise InvalidArgument(
                    f"{self._path} was measured with {name} {json.dumps(was)}, not {json.dumps(value)}: "
                    "figures of the two do not mix, name another --output"
                )
        self.settings |= settings

    def add(self, turns: list[TurnStats]) -> None:
        """Keeps a cell."""
        self.turns += turns
        self.write()

    def add_streams(self, row: dict[str, Any]) -> None:
        """Keeps the times between tokens of one mode."""
        self.streams.append(row)
        self.write()

    def write(self) -> None:
        """Writes the file, whole or not at all."""
        if self._path is None:
            return
        rows = summary(self.turns)
        document = {
            "settings": self.settings,
            "runs": self.runs,
            "summary": rows,
            "ratios": ratios(rows),
            "limits": [] if self._link_gb_s is None else limits(rows, self._link_gb_s),
            "streams": self.streams,
            "turns": [asdict(turn) for turn in self.turns],
        }
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(self._path)


def require_writable(path: Path) -> None:
    """Checks, before hours are measured, that a file can be written.

    Raises:
        InvalidArgument: it is a directory, or its directory is not there.
    """
    if path.is_dir():
        raise InvalidArgument(f"{path} is a directory")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{path}: there is no directory {path.parent}")


def read_record(path: Path) -> dict[str, Any]:
    """A record as it lies in its file, but `turns` as `TurnStats`.

    Raises:
        InvalidArgument: it is not one.
    """
    try:
        document: object = json.loads(path.read_text())
        if not isinstance(document, dict):
            raise TypeError(f"a {type(document).__name__}")
        read = cast("dict[str, Any]", document)
        return {**read, "turns": [_turn(**turn) for turn in read["turns"]]}
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
