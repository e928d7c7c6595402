"""Reads the conversations of vLLM's multi-turn benchmark (`benchmarks/multi_turn`), of either kind.

A list of conversations, as its ShareGPT conversion writes it: `[{"id": ..., "messages": [{"role", "content"}]}]`;
or the description of generated ones (`"filetype": "generate_conversations"`). Generated text is of no matter to
what is measured: tokens of the number that was drawn take its place, so `text_files` are not read.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvlease.bench.multiturn.distributions import distribution, kind_of, object_of
from kvlease.core.errors import InvalidArgument

GENERATED = "generate_conversations"
ASKING = ("system", "developer", "user", "tool")
ANSWERING = "assistant"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, or so many tokens that no other seed begins with."""

    text: str = ""
    seed: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn: what is asked, and an answer as long as what is to be generated; None: of any length."""

    question: tuple[Passage, ...]
    answer: Passage | None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other. The engine's own answers become the history."""

    name: str
    exchanges: tuple[Exchange, ...]


def read_conversations(path: Path, seed: int) -> list[Conversation]:
    """The conversations of a file, in its order.

    Raises:
        InvalidArgument: the file cannot be read, or is neither kind; the message names the place.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    try:
        return parse_conversations(document, seed)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def parse_conversations(document: Any, seed: int) -> list[Conversation]:
    """The conversations of a JSON document.

    Raises:
        InvalidArgument: it is neither a list of conversations nor describes generated ones.
    """
    if isinstance(document, dict):
        return list(_generated(cast(Mapping[str, Any], document), seed))
    if not isinstance(document, list) or not document:
        raise InvalidArgument(
            f'neither a list of conversations nor an object with "filetype": "{GENERATED}", but '
            + kind_of(cast(Any, document))
        )
    bodies = cast(Sequence[Any], document)
    found: dict[str, Conversation] = {}
    for number, body in enumerate(bodies):
        conversation = _listed(body, f"conversation {number}")
        if conversation.name in found:
            raise InvalidArgument(f"conversation {number}: the id {conversation.name!r} is there twice")
        found[conversation.name] = conversation
    return list(found.values())


# --- listed ---------------------------------------------------------------------------------------------------


def _listed(item: Any, where: str) -> Conversation:
    body = object_of(item, where)
    name = body.get("id")
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{where}: id must be a text that is not empty, not {name!r}")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        hint = "; raw ShareGPT is converted by vLLM's script first" if "conversations" in body else ""
        raise InvalidArgument(f"{where} ({name}): messages must be a list that is not empty{hint}")
    items = cast(Sequence[Any], messages)
    said = [_message(item, f"{where} ({name}), message {place}") for place, item in enumerate(items)]
    if said[0][0] == ANSWERING:
        raise InvalidArgument(f"{where} ({name}): an {ANSWERING} message answers nothing at the beginning")
    return Conversation(name, tuple(_exchanges(said)))


def _message(item: Any, where: str) -> tuple[str, str]:
    body = object_of(item, where)
    role, content = body.get("role"), body.get("content")
    if not isinstance(role, str) or role not in (*ASKING, ANSWERING):
        raise InvalidArgument(
            f"{where}: role is {role!r}, but must be one of {', '.join((*ASKING, ANSWERING))}"
        )
    if not isinstance(content, str) or not content:
        raise InvalidArgument(f"{where}: content must be a text that is not empty, not {kind_of(content)}")
    return role, content


def _exchanges(said: Sequence[tuple[str, str]]) -> Iterator[Exchange]:
    """What comes before an answer is one question; answers that follow each other are one."""
    question: list[Passage] = []
    answer = ""
    for role, content in said:
        if role == ANSWERING:
            answer += content
            continue
        if answer:
            yield Exchange(tuple(question), Passage(answer))
            question, answer = [], ""
        question.append(Passage(content))
    yield Exchange(tuple(question), Passage(answer) if answer else None)


# --- generated ------------------------------------------------------------------------------------------------


def _generated(body: Mapping[str, Any], seed: int) -> Iterator[Conversation]:
    if body.get("filetype") != GENERATED:
        raise InvalidArgument(f"filetype is {body.get('filetype')!r}, but must be {GENERATED!r}")
    count = body.get("num_conversations")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(f"num_conversations must be a whole number above 0, not {count!r}")
    asked, answered = _section(body, "prompt_input"), _section(body, "prompt_output")
    turns = distribution(asked.get("num_turns"), "prompt_input.num_turns")
    prefix = distribution(asked.get("prefix_num_tokens"), "prompt_input.prefix_num_tokens")
    question = distribution(asked.get("num_tokens"), "prompt_input.num_tokens")
    answer = distribution(answered.get("num_tokens"), "prompt_output.num_tokens")
    shared = asked.get("common_prefix_num_tokens", {"distribution": "constant", "value": 0})
    chance = random.Random(seed)
    common = Passage(
        seed=f"{seed}/common",
        tokens=distribution(shared, "prompt_input.common_prefix_num_tokens")(chance),
    )
    for number in range(count):
        name = f"CONV_ID_{number}"
        # A turn of the file is a message: every question has its answer.
        exchanges = -(-max(2, turns(chance)) // 2)
        sizes = [(question(chance), answer(chance)) for _ in range(exchanges)]
        yield Conversation(name, tuple(_drawn(f"{seed}/{name}", common, prefix(chance), sizes)))


def _drawn(seed: str, common: Passage, prefix: int, sizes: Sequence[tuple[int, int]]) -> Iterator[Exchange]:
    for place, (asked, answered) in enumerate(sizes):
        first = place == 0
        own = max(1, asked - common.tokens if first else asked)
        parts = [common, Passage(seed=f"{seed}/prefix", tokens=prefix)] if first else []
        parts.append(Passage(seed=f"{seed}/{place}", tokens=own))
        yield Exchange(
            tuple(part for part in parts if part.tokens > 0),
            Passage(seed=f"{seed}/{place}/answer", tokens=max(1, answered)),
        )


def _section(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return object_of(body.get(name), name)
