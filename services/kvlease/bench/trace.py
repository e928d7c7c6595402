"""Requests of a trace, each with the one that it continues.

A line is a request: `timestamp` in ms, `input_length` and `output_length` in tokens, and `hash_ids`, the prefix hashes
of the prompt's blocks of 512 tokens: equal ids mean an equal prefix. A trace names no conversations; they are derived:
a request continues the latest one that has its longest known prefix, if the two share more than one block. What it can
reuse is the prefix that they share, and the gap is the time between the two.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kvlease.core.errors import InvalidArgument

BLOCK_TOKENS = 512
BYTES_PER_TOKEN = 256 << 10
GIB = 1 << 30

LINE_TYPES: Mapping[str, tuple[type, ...]] = {
    "timestamp": (int, float),
    "input_length": (int,),
    "output_length": (int,),
    "hash_ids": (list,),
}


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of a trace.

    Attributes:
        tokens: of its prompt and its reply.
        parent: index of the request that it continues, -1 without one.
        shared_tokens: of the prefix that they share.
        prompt_tokens: of its prompt alone.
        prefixes: ids of the prompt's prefixes, block by block.
    """

    at_s: float
    tokens: int
    parent: int
    shared_tokens: int
    prompt_tokens: int = 0
    prefixes: tuple[int, ...] = ()

    @property
    def gib(self) -> float:
        """What the KV of its prompt and reply occupies."""
        return self.tokens * BYTES_PER_TOKEN / GIB


def read_trace(lines: Iterable[str]) -> list[Visit]:
    """The requests of a trace, in order of time.

    Raises:
        InvalidArgument: a line is no request, or earlier than the one before; it is named by its number.
    """
    owner_of_prefix: dict[int, int] = {}
    visits: list[Visit] = []
    for number, line in enumerate(lines, start=1):
        request = _parse(line, number)
        prefixes = cast(list[int], request["hash_ids"])
        input_tokens, output_tokens = cast(int, request["input_length"]), cast(int, request["output_length"])
        shared = next((n for n in range(len(prefixes), 1, -1) if prefixes[n - 1] in owner_of_prefix), 0)
        parent = owner_of_prefix[prefixes[shared - 1]] if shared else -1
        at_s = cast(float, request["timestamp"]) / 1e3
        if visits and at_s < visits[-1].at_s:
            raise InvalidArgument(f"line {number} is at {at_s:g} s, before the line above it")
        owner_of_prefix |= dict.fromkeys(prefixes, len(visits))
        shared_tokens = min(shared * BLOCK_TOKENS, input_tokens)
        tokens = input_tokens + output_tokens
        visits.append(Visit(at_s, tokens, parent, shared_tokens, input_tokens, tuple(prefixes)))
    return visits


def _parse(line: str, number: int) -> Mapping[str, object]:
    try:
        request: object = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"line {number} is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise InvalidArgument(f"line {number} is no JSON object")
    fields = cast(dict[str, object], request)
    for name, types in LINE_TYPES.items():
        if not isinstance(fields.get(name), types):
            raise InvalidArgument(f"line {number}: {name} is missing or of another type")
    return fields


def generate_trace(seed: int, seconds: int) -> Iterator[str]:
    """Lines of a made-up trace: two requests every three seconds.

    Half of the first turns are followed by another turn, more of the later ones; gaps are log-normal around two
    minutes, and a turn adds a block or two.
    """
    draws = random.Random(seed)
    due: list[tuple[float, Sequence[int]]] = []
    next_id = 1
    for third in range(2 * seconds // 3):
        now_s = 1.5 * third
        back = min((item for item in due if item[0] <= now_s), default=None)
        if back is not None:
            due.remove(back)
        prefix = [0] if back is None else list(back[1])
        new = draws.randint(1, 30) if back is None else draws.randint(1, 2)
        prefix += range(next_id, next_id + new)
        next_id += new
        if draws.random() < (0.5 if back is None else 0.8):
            due.append((now_s + draws.lognormvariate(4.8, 0.8), tuple(prefix)))
        yield json.dumps(
            {
                "timestamp": round(now_s * 1e3),
                "input_length": len(prefix) * BLOCK_TOKENS,
                "output_length": draws.randint(50, 500),
                "hash_ids": prefix,
            }
        )
