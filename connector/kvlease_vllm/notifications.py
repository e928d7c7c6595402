"""Keeps the completion notes of our READs out of vLLM's bookkeeping.

NIXL sends `<remote_request_id>:<consumers>` to the holder when a READ ends. The remote request id of our READs
is a pin id, and the holder keeps no request of that name: vLLM would log an error and count an expiry. The note
names no reader and is a hint at most; the reader's UNPIN is what counts.
"""

from typing import Any

PIN_PREFIX = "kvlease-"


def drop_own_notifications(nixl_wrapper: Any) -> None:
    """Wraps `get_new_notifs` of one NIXL agent so that notes named after our pins are left out."""
    receive = nixl_wrapper.get_new_notifs
    prefix = PIN_PREFIX.encode()

    def without_ours() -> dict[Any, list[bytes]]:
        return {
            agent: [note for note in notes if not note.startswith(prefix)]
            for agent, notes in receive().items()
        }

    nixl_wrapper.get_new_notifs = without_ours
