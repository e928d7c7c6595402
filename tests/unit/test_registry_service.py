"""A watch's messages stay small, however much one transaction changes."""

import pytest

from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.records import LeaseRecord
from kvlease.registry.service import CHANGES_MAX, parts_of
from kvlease.store.port import Batch, Change


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, [0]), (1, [1]), (CHANGES_MAX, [CHANGES_MAX]), (2 * CHANGES_MAX + 1, [CHANGES_MAX, CHANGES_MAX, 1])],
)
def test_a_batch_is_cut_and_only_its_first_part_replaces_what_was_known(
    count: int, sizes: list[int], snapshot: bool
) -> None:
    record = LeaseRecord(1, LeaseKind.CONVERSATION, LeaseState.HELD, Holder("e", "b"), "t", b"c", 64)
    parts = list(parts_of(Batch((Change(record),) * count, snapshot)))
    assert [len(changes) for _, changes in parts] == sizes
    assert [replaces for replaces, _ in parts] == [snapshot] + [False] * (len(sizes) - 1)
