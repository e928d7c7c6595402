"""A table that forgets what was not used lately."""

from typing import Generic, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class Recent(Generic[Key, Item]):
    """Keeps the items used last, in two generations: using one costs no more than finding it.

    Args:
        items_max: items of one generation; at least so many are kept, and at most twice as many.
    """

    def __init__(self, items_max: int) -> None:
        self._items_max = items_max
        self._young: dict[Key, Item] = {}
        self._old: dict[Key, Item] = {}

    def get(self, key: Key) -> Item | None:
        """The item, None when it is not kept."""
        item = self._young.get(key)
        if item is None:
            item = self._old.pop(key, None)
            if item is not None:
                self.put(key, item)
        return item

    def put(self, key: Key, item: Item) -> None:
        """Keeps an item."""
        if len(self._young) >= self._items_max:
            self._old, self._young = self._young, {}
        self._young[key] = item
