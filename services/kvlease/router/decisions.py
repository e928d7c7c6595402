"""The latest decisions of a router, in memory and, where an operator wants it, in a file."""

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TextIO

from kvlease.core.decisions import Decision, decided, pairs_that_matter
from kvlease.core.planning import Plan
from kvlease.core.rates import Line
from kvlease.core.signals import TurnSignals

log = logging.getLogger(__name__)


class _Noted(NamedTuple):
    """What a decision is made of: few of them are ever asked for."""

    tenant: str
    signals: TurnSignals
    made: Plan | None
    pairs: Mapping[tuple[str, str], Line]


class DecisionLog:
    """Keeps the latest decisions by the id of their turn.

    Args:
        kept_max: decisions in memory; the oldest leaves first.
        file: a line of JSON per decision goes there, too; None: nowhere. When it cannot be written, that is
            logged once and nothing more is written.
    """

    def __init__(self, kept_max: int, file: Path | None = None) -> None:
        self._kept_max = kept_max
        self._decisions: OrderedDict[str, _Noted] = OrderedDict()
        self._path = file
        self._file: TextIO | None = None

    def note(self, tenant: str, turn_id: str, signals: TurnSignals, made: Plan | None) -> None:
        """A plan was made."""
        pairs = pairs_that_matter(signals, made)
        self._decisions[turn_id] = _Noted(tenant, signals, made, pairs)
        self._decisions.move_to_end(turn_id)
        if len(self._decisions) > self._kept_max:
            self._decisions.popitem(last=False)
        if self._path is not None:
            self._write(self._path, decided(turn_id, signals, made, pairs))

    def find(self, tenant: str, turn_id: str) -> Decision | None:
        """The decision of a tenant's turn; None when it is not kept."""
        noted = self._decisions.get(turn_id)
        if noted is None or noted.tenant != tenant:
            return None
        return decided(turn_id, noted.signals, noted.made, noted.pairs)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, path: Path, decision: Decision) -> None:
        try:
            if self._file is None:
                self._file = path.open("a", buffering=1, encoding="utf-8")
            self._file.write(json.dumps(decision.to_json(), separators=(",", ":")) + "\n")
        except OSError as error:
            log.warning("decisions are not written", extra={"file": str(path), "reason": str(error)})
            self._path = None
