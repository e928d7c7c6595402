"""Conversations that are replayed: what each turn sends, what is measured, and what does not fit."""

import json
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvlease.bench.multiturn import main
from kvlease.bench.multiturn.client import Reply
from kvlease.bench.multiturn.conversations import Conversation, Exchange, Passage
from kvlease.bench.multiturn.fleet import Running
from kvlease.bench.multiturn.plan import Mode, TurnStats
from kvlease.bench.multiturn.replay import Replay, ReplayCell, ReplayPlan
from kvlease.bench.multiturn.report import compared, ratios, summary
from kvlease.core.errors import InvalidArgument

CONTEXT = 900
VOCABULARY = 4000


class Fleet:
    """Answers with token 9 as often as it was asked to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], int, bool, str]] = []

    async def turn(
        self, conversation_id: str, prompt: Sequence[int], tokens: int, *, stream: bool, salt: str = ""
    ) -> Reply:
        self.asked.append((conversation_id, list(prompt), tokens, stream, salt))
        return Reply([9] * tokens, ttft_s=0.01 * len(prompt), path="append", reused_tokens=len(prompt) // 2)


@pytest.fixture
async def engine_url() -> AsyncIterator[str]:
    """What a replay asks an engine: its counters, its context, and a text's tokens, one per byte."""

    looks = count()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=f"vllm:nixl_bytes_transferred_sum {next(looks) * 1000}\n")

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model", "max_model_len": CONTEXT}]})

    async def tokens(request: web.Request) -> web.Response:
        return web.json_response({"tokens": list((await request.json())["prompt"].encode())})

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/v1/models", models), web.post("/tokenize", tokens)]
    )
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def exchange(question: str, answer: str | None) -> Exchange:
    return Exchange((Passage(question),), Passage(answer) if answer else None)


TALK = Conversation("talk", (exchange("Hello", "Good day"), exchange("More", None)))


def plan(*conversations: Conversation, **changes: Any) -> ReplayPlan:
    values: dict[str, Any] = {
        "modes": (Mode.APPEND,),
        "source": "talk.json",
        "conversations": conversations,
        "at_once": 2,
        "repeats": 1,
        "output_tokens": 5,
        "think_s": 0.0,
        "has_tokenizer": True,
    }
    return ReplayPlan(**{**values, **changes})


async def replayed(engine_url: str, mode: Mode, *conversations: Conversation, **changes: Any) -> Any:
    """What the fleet was asked in the cell, and what was measured."""
    fleet = Fleet()
    async with aiohttp.ClientSession() as session:
        running = Running(session, (engine_url,), (engine_url,), {mode: fleet}, "model", VOCABULARY)
        replay = Replay(plan(*conversations, modes=(mode,), **changes))
        await replay.warm(running)
        fleet.asked.clear()
        return fleet.asked, await replay.run(running, ReplayCell(mode, "talk.json", 2, 0))


async def test_the_engines_own_answers_become_the_history(engine_url: str) -> None:
    asked, turns = await replayed(engine_url, Mode.APPEND, TALK)
    hello, more = list(b"Hello"), list(b"More")
    assert [prompt for _, prompt, *_ in asked] == [hello, hello + [9] * 8 + more]
    assert [tokens for _, _, tokens, *_ in asked] == [8, 5]
    assert len({name for name, *_ in asked}) == len({salt for *_, salt in asked}) == 1
    assert [(turn.turn, turn.length, turn.suffix, turn.input_num_tokens) for turn in turns] == [
        (1, 0, 5, 5),
        (2, 5, 4, 17),
    ]


async def test_of_stock_engines_the_last_turn_is_measured_and_alone_streamed(engine_url: str) -> None:
    asked, turns = await replayed(engine_url, Mode.STOCK, TALK)
    assert [stream for *_, stream, _ in asked] == [False, True]
    assert [turn.turn for turn in turns] == [2]


async def test_what_unmeasured_turns_read_is_not_counted_to_measured_ones(engine_url: str) -> None:
    _, (last,) = await replayed(engine_url, Mode.STOCK, TALK)
    # Each look at the counters finds 1,000 bytes more; the conversation has two turns.
    assert (last.prefill_bytes, last.bytes) == (1000.0, 2000.0)


async def test_without_a_tokenizer_texts_are_estimated_and_equal_ones_stay_equal(engine_url: str) -> None:
    said = Conversation("a", (exchange("x" * 40, "y" * 12),))
    asked, _ = await replayed(
        engine_url, Mode.ON, said, Conversation("b", said.exchanges), has_tokenizer=False
    )
    (_, one, tokens, *_), (_, other, *_) = asked
    assert (len(one), tokens) == (10, 3)
    assert one == other


async def test_a_conversation_longer_than_the_context_is_refused_with_what_fits(engine_url: str) -> None:
    long = Conversation("long", (exchange("x" * 400, None), exchange("y" * 500, None)))
    with pytest.raises(InvalidArgument, match=r"long needs 910 tokens.*900: 1 of its 2 turns.*--turns-max"):
        await replayed(engine_url, Mode.ON, long)


async def test_a_summary_has_a_row_per_turn_and_compares_it_by_its_number(engine_url: str) -> None:
    longer = Conversation("longer", (exchange("Hello, you", "Good day"), exchange("And now?", "x")))
    _, turns = await replayed(engine_url, Mode.APPEND, TALK, longer)
    rows = summary(turns)
    assert [(row["source"], row["turn"], row["turns"]) for row in rows] == [
        ("talk.json", 1, 2),
        ("talk.json", 2, 2),
    ]
    assert [row["turn"] for row in ratios(rows)] == [1, 2]
    assert [row["ratio"] for row in compared(rows, rows)] == [1.0, 1.0]


async def test_a_ratio_to_stock_is_of_turns_of_the_same_conversations(engine_url: str) -> None:
    short = Conversation("short", (exchange("Hello", "Good day"), exchange("More", None)))
    longer = Conversation("longer", (*short.exchanges, exchange("And then?", None)))
    turns: list[TurnStats] = []
    for mode in (Mode.ON, Mode.STOCK):
        turns += (await replayed(engine_url, mode, short, longer))[1]
    compared_turns = {
        (found["turn"], found["last"]): "readback_to_stock" in found for found in ratios(summary(turns))
    }
    assert compared_turns == {(1, False): False, (2, True): True, (2, False): False, (3, True): True}


def test_cells_alternate_between_modes_and_leave_stock_for_last() -> None:
    cells = plan(TALK, modes=(Mode.STOCK, Mode.OFF, Mode.ON), repeats=1).cells({"on/talk.jsonx2#0"})
    assert [cell.name for cell in cells] == ["off/talk.jsonx2#0", "stock/talk.jsonx2#0"]


@pytest.mark.parametrize(
    "changes", [{"at_once": 0}, {"repeats": 0}, {"think_s": -1.0}, {"conversations": ()}]
)
def test_a_plan_that_replays_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        plan(TALK, **changes)


def dry_run(*flags: str) -> int:
    parser = ArgumentParser()
    main.add_arguments(parser)
    return main.run(parser.parse_args([*flags, "--dry-run"]))


def test_a_dry_run_names_the_cells_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"id": "a", "messages": [{"role": "user", "content": "Hello"}]}]))
    assert dry_run("--input", str(path), "--modes", "on,off", "--repeats", "1", "--conversations", "4") == 0
    assert capsys.readouterr().out.split() == ["on/talk.jsonx4#0", "off/talk.jsonx4#0"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--input", "FILE"), "messages must be a list"),
        (("--input", "FILE", "--conversations", "1,2"), "one number"),
        (("--input", "FILE", "--turns-max", "0"), "--turns-max must be above 0"),
        (("--input", "FILE", "--plot", "x"), "--plot is for a sweep"),
        (("--turns-max", "2"), "--turns-max is for --input"),
    ],
)
def test_flags_that_do_not_fit_are_refused_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], names: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text('[{"id": "a"}]')
    assert dry_run(*(str(path) if flag == "FILE" else flag for flag in flags)) == 1
    assert names in capsys.readouterr().err
