"""Files of vLLM's multi-turn benchmark: what is read from them, and what is said of those that are wrong."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from kvlease.bench.multiturn.conversations import Exchange, Passage, parse_conversations, read_conversations
from kvlease.bench.multiturn.distributions import distribution
from kvlease.core.errors import InvalidArgument

DRAWS = 4000


def constant(value: float) -> dict[str, Any]:
    return {"distribution": "constant", "value": value}


def generated(**changes: Any) -> dict[str, Any]:
    """The file that vLLM's benchmark brings, with constants."""
    asked = {
        "num_turns": constant(5),
        "common_prefix_num_tokens": constant(50),
        "prefix_num_tokens": constant(100),
        "num_tokens": constant(70),
    }
    body = {
        "filetype": "generate_conversations",
        "num_conversations": 3,
        "text_files": ["pg1184.txt"],
        "print_stats": False,
        "prompt_input": asked,
        "prompt_output": {"num_tokens": constant(30)},
    }
    return {**body, **changes}


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def listed(*messages: dict[str, Any], name: Any = "a") -> dict[str, Any]:
    return {"id": name, "messages": list(messages)}


def test_a_listed_conversation_becomes_questions_with_their_answers() -> None:
    said = listed(
        message("system", "Be kind."),
        message("user", "Hello"),
        message("assistant", "Good "),
        message("assistant", "day"),
        message("user", "More"),
    )
    (conversation,) = parse_conversations([said], 0)
    assert conversation.name == "a"
    assert conversation.exchanges == (
        Exchange((Passage("Be kind."), Passage("Hello")), Passage("Good day")),
        Exchange((Passage("More"),), None),
    )


def test_generated_conversations_have_the_numbers_of_tokens_that_were_drawn() -> None:
    conversations = parse_conversations(generated(), 7)
    assert [conversation.name for conversation in conversations] == ["CONV_ID_0", "CONV_ID_1", "CONV_ID_2"]
    for conversation in conversations:
        questions = [[passage.tokens for passage in exchange.question] for exchange in conversation.exchanges]
        # Five messages are rounded up to six; what the prefix leaves of the first question follows it.
        assert questions == [[50, 100, 20], [70], [70]]
        assert [exchange.answer.tokens for exchange in conversation.exchanges if exchange.answer] == [30] * 3
    seeds = [[passage.seed for passage in one.exchanges[0].question] for one in conversations]
    assert len({first for first, _, _ in seeds}) == 1
    assert len({own for _, *rest in seeds for own in rest}) == 6


def test_the_same_seed_generates_the_same_conversations() -> None:
    drawn = generated(prompt_output={"num_tokens": {"distribution": "poisson", "alpha": 40}})
    assert parse_conversations(drawn, 1) == parse_conversations(drawn, 1)
    assert parse_conversations(drawn, 1) != parse_conversations(drawn, 2)


@pytest.mark.parametrize(
    ("body", "low", "high"),
    [
        ({"distribution": "constant", "value": 0}, 0, 0),
        ({"distribution": "uniform", "min": 12, "max": 18}, 14.5, 15.5),
        ({"distribution": "lognormal", "average": 1000}, 950, 1050),
        ({"distribution": "lognormal", "average": 1000, "max": 1000}, 700, 950),
        ({"distribution": "lognormal", "mean": 3.0, "sigma": 0.01}, 19, 21),
        ({"distribution": "poisson", "alpha": 10}, 9.5, 10.5),
        ({"distribution": "zipf", "alpha": 4.0}, 1.05, 1.2),
        ({"distribution": "zipf", "alpha": 1.2, "max": 100}, 5, 50),
    ],
)
def test_a_distribution_has_its_average_and_keeps_its_bound(
    body: dict[str, Any], low: float, high: float
) -> None:
    chance = random.Random(5)
    sample = distribution(body, "x")
    drawn = [sample(chance) for _ in range(DRAWS)]
    assert low <= fmean(drawn) <= high
    assert max(drawn) <= body.get("max", max(drawn))


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ([], "a list"),
        ("text", "a str"),
        ({"filetype": "other"}, "filetype is 'other'"),
        ([7], "conversation 0 must be an object, not a int"),
        ([{"messages": []}], "conversation 0: id"),
        ([listed(name=5)], "conversation 0: id"),
        ([listed()], r"conversation 0 \(a\): messages"),
        ([{"id": "a", "conversations": [{"from": "human"}]}], "ShareGPT is converted"),
        ([listed(message("human", "x"))], r"message 0: role is 'human'"),
        ([listed(message("user", ["x"]))], "message 0: content.*a list"),
        ([listed(message("user", ""))], "message 0: content"),
        ([listed(message("assistant", "x"))], "answers nothing"),
        ([listed(message("user", "x"))] * 2, "'a' is there twice"),
        (generated(num_conversations=0), "num_conversations.*0"),
        (generated(num_conversations=True), "num_conversations.*True"),
        (generated(prompt_output=None), "prompt_output must be an object"),
        (generated(prompt_input={}), r"prompt_input\.num_turns"),
        (generated(prompt_output={"num_tokens": 5}), r"prompt_output\.num_tokens must be an object"),
        (
            generated(prompt_output={"num_tokens": {"distribution": "normal"}}),
            r"prompt_output\.num_tokens\.distribution is 'normal'.*poisson",
        ),
    ],
)
def test_what_is_wrong_with_a_document_is_said_with_its_place(document: Any, names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        parse_conversations(document, 0)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"distribution": "constant"}, r"x\.value"),
        ({"distribution": "constant", "value": "5"}, r"x\.value.*'5'"),
        ({"distribution": "uniform", "min": 5, "max": 4}, r"x: min \(5\).*max \(4\)"),
        ({"distribution": "lognormal", "average": 10, "median_ratio": 1.5}, r"median_ratio.*1\.5"),
        ({"distribution": "lognormal", "mean": 1}, r"x\.sigma"),
        ({"distribution": "zipf", "alpha": 1}, r"x\.alpha.*above 1"),
        ({"distribution": "poisson", "alpha": 1, "max": 0}, r"x\.max"),
        ({"distribution": ["zipf"]}, r"x\.distribution"),
    ],
)
def test_what_is_wrong_with_a_distribution_is_said_by_name(body: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        distribution(body, "x")


def test_a_file_is_named_when_it_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gone\.json cannot be read"):
        read_conversations(tmp_path / "gone.json", 0)
    path = tmp_path / "half.json"
    path.write_text('[{"id": ')
    with pytest.raises(InvalidArgument, match=r"half\.json is not JSON"):
        read_conversations(path, 0)
    path.write_text(json.dumps([{"id": "a"}]))
    with pytest.raises(InvalidArgument, match=r"half\.json: conversation 0 \(a\): messages"):
        read_conversations(path, 0)
