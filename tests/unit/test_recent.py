"""What was used lately is kept, and no more than that."""

from kvlease.core.recent import Recent


def test_items_that_are_used_stay_and_others_leave() -> None:
    recent = Recent[int, str](10)
    recent.put(-1, "used")
    for number in range(100):
        recent.put(number, "unused")
        assert recent.get(-1) == "used"
    kept = [number for number in range(100) if recent.get(number) is not None]
    assert 8 <= len(kept) <= 19
    assert kept == list(range(kept[0], 100))


def test_what_was_never_put_is_not_there() -> None:
    assert Recent[str, str](1).get("x") is None
