"""Counts of what is in flight, by name."""

from collections import Counter
from contextlib import AbstractContextManager
from types import TracebackType


class Counted(AbstractContextManager[None]):
    """Adds to a count while the context lasts; a count of nothing leaves no entry. Cheap: every turn has several."""

    __slots__ = ("_amount", "_counter", "_name")

    def __init__(self, counter: Counter[str], name: str, amount: int = 1) -> None:
        self._counter = counter
        self._name = name
        self._amount = amount

    def __enter__(self) -> None:
        self._counter[self._name] += self._amount

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        uncount(self._counter, self._name, self._amount)


class Held(AbstractContextManager["Held"]):
    """Keeps a count until it is closed, or until its context ends. Can be used again."""

    __slots__ = ("_counted",)

    def __init__(self) -> None:
        self._counted: list[AbstractContextManager[None]] = []

    def __enter__(self) -> "Held":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def hold(self, counted: AbstractContextManager[None]) -> None:
        """Begins to count."""
        counted.__enter__()
        self._counted.append(counted)

    def close(self) -> None:
        """Ends all that counts. Idempotent."""
        while self._counted:
            self._counted.pop().__exit__(None, None, None)


def uncount(counter: Counter[str], name: str, amount: int = 1) -> None:
    """Takes from a count."""
    left = counter[name] = counter[name] - amount
    if left <= 0:
        del counter[name]
