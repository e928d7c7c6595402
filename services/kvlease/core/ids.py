"""Identities that cross processes: leases and holders.

A lease id is 64 random bits, drawn by the router when it dispatches a turn; JSON carries it as 16 hex digits.
"""

import re

from kvlease.core.errors import InvalidArgument
from kvlease.core.values import value

LEASE_ID_LIMIT = 1 << 64
_HEX_DIGITS = re.compile("[0-9a-fA-F]{16}")


def lease_id_to_hex(lease_id: int) -> str:
    """The 16 lower case hex digits of a lease id."""
    return f"{lease_id:016x}"


def lease_id_from_hex(text: str) -> int:
    """Reads a lease id.

    Raises:
        InvalidArgument: the text is not 16 hex digits, or is zero.
    """
    if not _HEX_DIGITS.fullmatch(text) or int(text, 16) == 0:
        raise InvalidArgument("a lease id is 16 hex digits and not zero")
    return int(text, 16)


@value
class Holder:
    """The incarnation of an engine that keeps the blocks of a lease.

    Attributes:
        engine_id: vLLM's engine id, drawn per start.
        boot_id: random id minted by the engine process.
        epoch: grows by one with every cache reset; 0 in a question means "whichever".
    """

    engine_id: str
    boot_id: str
    epoch: int = 0

    def answers_for(self, asked: "Holder") -> bool:
        """Whether a question addressed to `asked` may be answered by this holder."""
        same_process = self.engine_id == asked.engine_id and self.boot_id == asked.boot_id
        return same_process and asked.epoch in (0, self.epoch)
