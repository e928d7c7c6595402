"""The order in which tenants' turns are let in."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.fairness import FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    order: list[str] = []
    while (item := queue.pop()) is not None:
        order.append(item)
    return order


def test_a_tenant_that_sends_much_delays_itself_and_nobody_else() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push("loud", 1.0, f"loud {number}")
    queue.push("quiet", 1.0, "quiet 0")
    assert "quiet 0" in [queue.pop() for _ in range(2)]


def test_tenants_share_by_weight() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(60):
        queue.push("one", 1.0, f"one {number}")
        queue.push("two", 2.0, f"two {number}")
    served = Counter(item.split()[0] for item in drained(queue)[:60])
    assert 38 <= served["two"] <= 42


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.push("busy", 1.0, f"busy {number}")
    for _ in range(25):
        queue.pop()
    for number in range(50):
        queue.push("back", 1.0, f"back {number}")
    served = Counter(item.split()[0] for item in drained(queue)[:20])
    assert 9 <= served["back"] <= 11


def test_what_no_longer_waits_is_passed_over() -> None:
    queue: FairQueue[str] = FairQueue()
    items = [f"item {number}" for number in range(3)]
    for item in items:
        queue.push("t", 1.0, item)
    assert queue.remove(items[1])
    assert not queue.remove(items[1])
    assert (len(queue), queue.waiting("t")) == (2, 2)
    assert drained(queue) == [items[0], items[2]]
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 3.0])), max_size=60))
def test_everything_comes_out_once_and_each_tenants_items_in_order(pushed: list[tuple[str, float]]) -> None:
    queue: FairQueue[str] = FairQueue()
    items = [f"{tenant} {number:03}" for number, (tenant, _) in enumerate(pushed)]
    for item, (tenant, weight) in zip(items, pushed, strict=True):
        queue.push(tenant, weight, item)
    order = drained(queue)
    assert sorted(order) == sorted(items)
    for tenant in "abc":
        own = [item for item in order if item.startswith(tenant)]
        assert own == sorted(own)
