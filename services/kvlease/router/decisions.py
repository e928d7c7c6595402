"""The latest decisions of a router, in memory and, where an operator wants it, in a file."""

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TextIO

from kvlease.core.decisions import Decision, decided, pairs_that_matter
from kvlease.core.planning import Plan
from kvlease.core.rates import Line
from kvlease.core.signals import TurnSignals
from kvlease.router.conversation import TurnRecord

log = logging.getLogger(__name__)


class Noted(NamedTuple):
    """What a decision is made of: few of them are ever asked for.

    Attributes:
        record: the turn's, as it goes on; None when no engine could decode.
    """

    tenant: str
    turn_id: str
    signals: TurnSignals
    made: Plan | None
    pairs: Mapping[tuple[str, str], Line]
    record: TurnRecord | None

    def decision(self) -> Decision:
        """The decision, and what became of its decode engine so far."""
        made = decided(self.turn_id, self.signals, self.made, self.pairs)
        if self.record is None:
            return made
        return replace(
            made, decode_anew_id=self.record.decode_anew_id, served_by_id=self.record.decode_engine_id
        )


class DecisionLog:
    """Keeps the latest decisions by the id of their turn.

    Args:
        kept_max: decisions in memory; the oldest leaves first.
        file: a line of JSON per decision goes there when its turn has ended; None: nowhere. When it cannot be
            written, that is logged once and nothing more is written.
    """

    def __init__(self, kept_max: int, file: Path | None = None) -> None:
        self._kept_max = kept_max
        self._decisions: OrderedDict[str, Noted] = OrderedDict()
        self._path = file
        self._file: TextIO | None = None

    def note(
        self, tenant: str, turn_id: str, signals: TurnSignals, made: Plan | None, record: TurnRecord | None
    ) -> Noted:
        """A plan was made, whose turn writes this record. What is to be given to `end`."""
        noted = Noted(tenant, turn_id, signals, made, pairs_that_matter(signals, made), record)
        self._decisions[turn_id] = noted
        self._decisions.move_to_end(turn_id)
        if len(self._decisions) > self._kept_max:
            self._decisions.popitem(last=False)
        return noted

    def end(self, noted: Noted) -> None:
        """The turn has ended: what it was is written."""
        if self._path is not None:
            self._write(self._path, noted.decision())

    def find(self, tenant: str, turn_id: str) -> Decision | None:
        """The decision of a tenant's turn; None when it is not kept."""
        noted = self._decisions.get(turn_id)
        if noted is None or noted.tenant != tenant:
            return None
        return noted.decision()

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
