"""Virtual time, and the links on which READs take it."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Events:
    """What is due, in order of time; of two at one time what was asked for first. It is a `Clock`, too."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Action]] = []

    def now_s(self) -> float:
        """Seconds since the replay began."""
        return self._now_s

    def at(self, at_s: float, action: Action) -> None:
        """Does something at a time, at once when that has passed."""
        heapq.heappush(self._due, (max(at_s, self._now_s), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Does something so much later."""
        self.at(self._now_s + seconds, action)

    def run(self) -> None:
        """Runs until nothing is due."""
        while self._due:
            self._now_s, _, action = heapq.heappop(self._due)
            action()


class Links:
    """One READ at a time leaves an engine, and one arrives; a READ waits for both of its ends.

    Args:
        token_s: to READ the KV of a token.
    """

    def __init__(self, events: Events, token_s: float) -> None:
        self._events = events
        self._token_s = token_s
        self._free_s: dict[tuple[str, str], float] = {}

    def read(self, source_id: str, sink_id: str, tokens: int, done: Callable[[float], None]) -> None:
        """READs the KV of so many tokens; `done` gets the seconds since it was asked for."""
        now_s, ends = self._events.now_s(), (("out", source_id), ("in", sink_id))
        begins_s = max(now_s, *(self._free_s.get(end, 0.0) for end in ends))
        ends_s = begins_s + tokens * self._token_s
        self._free_s.update(dict.fromkeys(ends, ends_s))
        self._events.at(ends_s, lambda: done(ends_s - now_s))
