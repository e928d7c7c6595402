"""Why no decode engine can serve a turn, in the words that clients, probes and operators see alike."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unserved:
    """Nobody takes a turn.

    Attributes:
        message: for people.
        code: the machine-readable reason of the 503.
    """

    message: str
    code: str


NONE_REGISTERED = Unserved("no decode engine is registered", "unavailable")
ALL_DRAINING = Unserved("every decode engine is draining", "decode_engines_draining")


def unserved(draining: Iterable[bool]) -> Unserved | None:
    """Why decode engines, of which it is told whether they drain, take no turn; None when one does."""
    told = list(draining)
    if not all(told):
        return None
    return ALL_DRAINING if told else NONE_REGISTERED
