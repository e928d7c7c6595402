"""Which engines have computed which prompts, and so are likely to have them in their prefix caches. Pure, bounded."""

from collections import OrderedDict
from collections.abc import Sequence

HEAD_KEYS = 2
"""Keys at a prompt's head that are remembered beside its last one: the system's words, which conversations share."""

ENGINES_MAX = 8


class PrefixMemory:
    """Remembers chain keys by the engines that computed them; the key used longest ago leaves first.

    Args:
        keys_max: how many keys are remembered.
    """

    def __init__(self, keys_max: int = 100_000) -> None:
        self._keys_max = keys_max
        self._engines: OrderedDict[int, OrderedDict[str, None]] = OrderedDict()

    def remember(self, engine_id: str, keys: Sequence[int]) -> None:
        """An engine computed the prompt of a chain."""
        for key in {*keys[:HEAD_KEYS], *keys[-1:]}:
            engines = self._engines.setdefault(key, OrderedDict())
            self._engines.move_to_end(key)
            engines[engine_id] = None
            engines.move_to_end(engine_id)
            if len(engines) > ENGINES_MAX:
                engines.popitem(last=False)
            if len(self._engines) > self._keys_max:
                self._engines.popitem(last=False)

    def cached_bytes(self, keys: Sequence[int], ends: Sequence[int]) -> dict[str, int]:
        """By engine, the bytes of text of a chain's longest beginning that it computed."""
        found: dict[str, int] = {}
        for key, end in zip(reversed(keys), reversed(ends), strict=True):
            for engine_id in self._engines.get(key, ()):
                found.setdefault(engine_id, end)
        return found
