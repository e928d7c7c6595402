"""What a registry tells of the fleet when it is scraped."""

from collections import Counter
from collections.abc import Iterator

from kvlease.registry.registry import Registry
from kvlease.runtime import metric_catalogue as catalogue
from kvlease.runtime.metrics import Sample


class EngineCounts:
    """Engines by role and state, as the store's watch told."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __call__(self) -> Iterator[Sample]:
        """What a scrape has of them."""
        counts = Counter(
            (engine.role.value, "draining" if engine.draining else "ready")
            for engine in self._registry.known_engines()
        )
        for labels, count in sorted(counts.items()):
            yield Sample(catalogue.ENGINES, count, labels)
