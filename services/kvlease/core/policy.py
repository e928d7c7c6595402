"""In which order leases are worth keeping."""

from collections.abc import Mapping


def eviction_order(renewed_s: Mapping[int, float]) -> tuple[int, ...]:
    """Lease ids from the least to the most worth keeping: the least recently renewed one goes first."""
    return tuple(sorted(renewed_s, key=lambda lease_id: (renewed_s[lease_id], lease_id)))
