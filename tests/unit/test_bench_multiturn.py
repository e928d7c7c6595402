"""The sweep of turn two: which cells there are, what is kept of them, and what is said of it."""

import asyncio
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvlease.bench import compare
from kvlease.bench.multiturn import charts, main
from kvlease.bench.multiturn.client import Reply
from kvlease.bench.multiturn.engines import ReadCounters, Reads, TurnFailedError, handshakes
from kvlease.bench.multiturn.experiment import Experiment
from kvlease.bench.multiturn.flags import stock_config_of
from kvlease.bench.multiturn.fleet import Running
from kvlease.bench.multiturn.plan import Cell, Mode, Point, Sweep, TurnStats
from kvlease.bench.multiturn.record import Record, read_record
from kvlease.bench.multiturn.report import compared, limits, ratios, strays, summary
from kvlease.bench.multiturn.stock import KeptRoom
from kvlease.bench.multiturn.streams import StreamPlan, beside_turns
from kvlease.core.errors import InvalidArgument

ATTACHED = ("--prefill-url", "http://p:1", "--decode-url", "http://d:1")


def sweep(*modes: Mode, **changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "points": (Point(1024, 128), Point(4096, 128)),
        "repeats": 2,
        "output_tokens": 32,
        "thinks_s": (0.0,),
        "seed": 0,
    }
    return Sweep(modes, **{**values, **changes})


def turn(mode: Mode = Mode.ON, ttft_ms: float = 100.0, **changes: Any) -> TurnStats:
    stats = TurnStats(
        "cell", mode, 8192, 128, 1, "conversation", 8352, ttft_ms, mode.path, "", 8192, 0.6 * ttft_ms
    )
    return replace(stats, **changes)


# --- cells ----------------------------------------------------------------------------------------------------


def test_modes_alternate_within_a_repeat_and_stock_comes_last() -> None:
    cells = [cell.name for cell in sweep(Mode.STOCK, Mode.OFF, Mode.ON, points=(Point(8, 2),)).cells()]
    assert cells == [
        *("off/8+2x1#0", "on/8+2x1#0", "off/8+2x1#1", "on/8+2x1#1"),
        *("stock/8+2x1#0", "stock/8+2x1#1"),
    ]


def test_side_by_side_every_mode_measures_a_point_before_the_next() -> None:
    cells = list(sweep(Mode.ON, Mode.STOCK).cells())
    assert [cell.name for cell in main.side_by_side(cells)] == [
        *("on/1024+128x1#0", "stock/1024+128x1#0", "on/4096+128x1#0", "stock/4096+128x1#0"),
        *("on/1024+128x1#1", "stock/1024+128x1#1", "on/4096+128x1#1", "stock/4096+128x1#1"),
    ]


def test_every_point_is_measured_with_every_think_time() -> None:
    cells = sweep(Mode.ON, points=(Point(8, 2, 4),), thinks_s=(0.0, 2.5), repeats=1).cells({"on/8+2x4#0"})
    assert [(cell.name, cell.think_s) for cell in cells] == [("on/8+2x4~2.5s#0", 2.5)]


def test_stock_engines_are_warmed_by_as_many_turns_as_ours() -> None:
    ours = Mode.OFF, Mode.ON, Mode.APPEND, Mode.AUTO
    experiment = Experiment(sweep(*ours, Mode.STOCK))
    turns = [list(experiment.warm_cells(modes)) for modes in (ours, (Mode.STOCK,))]
    assert len(turns[0]) == len(turns[1]) == 4 * 2 + 12
    # A stock decode engine keeps each for a while: the further ones are short.
    assert [cell.length for cell in turns[1]] == [1024, 4096, *(1024,) * 18]


def test_a_conversation_waits_while_a_stock_engine_keeps_too_much_that_nobody_reads() -> None:
    clock = [0.0]
    room = KeptRoom(kept_s=30.0, tokens_max=1000.0, now_s=lambda: clock[0])
    assert room.wait_s(5000) == 0.0  # waiting would give it no more
    room.keep(600)
    clock[0] = 10.0
    room.keep(300)
    assert (room.wait_s(100), room.wait_s(101)) == (0.0, 20.0)
    clock[0] = 30.0
    assert (room.wait_s(700), room.wait_s(701)) == (0.0, 10.0)
    assert KeptRoom(30.0, None).wait_s(1 << 40) == 0.0


@pytest.mark.parametrize(
    ("flags", "kept_s"),
    [
        ((), 120),
        (("--device", "cuda", "--think-s", "0,7.5"), 38),
        (("--device", "cuda", "--conversations", "1,6"), 60),
        (("--device", "cuda", "--points", "8+2,8+2x9"), 90),
        (("--stock-config", '{"decoder_kv_blocks_ttl": 480}'), 480),
    ],
)
def test_stock_engines_keep_turns_as_long_as_the_next_may_take(flags: tuple[str, ...], kept_s: int) -> None:
    parser = ArgumentParser()
    main.add_arguments(parser)
    assert stock_config_of(parser.parse_args(flags)) == {"decoder_kv_blocks_ttl": kept_s}


# --- figures --------------------------------------------------------------------------------------------------


def test_a_turns_share_tells_what_the_prefill_engine_read_back() -> None:
    reads = Reads(ReadCounters(600.0, 0.03, 6.0), ReadCounters(40.0, 0.01, 2.0)).share(2)
    moved = turn().moved(reads)
    assert (moved.bytes, moved.transfer_ms, moved.descriptors) == (320.0, 20.0, 4.0)
    assert (moved.prefill_bytes, moved.prefill_transfer_ms) == (300.0, 15.0)


def test_a_row_has_medians_percentiles_and_how_often_each_path_was_taken() -> None:
    turns = [turn(ttft_ms=float(ttft)) for ttft in range(10, 110, 10)]
    (row,) = summary([*turns[:-1], replace(turns[-1], path="recompute", reason="miss")])
    assert (row["turns"], row["ttft_mean_ms"], row["ttft_p50_ms"]) == (10, 55.0, 55.0)
    assert (row["ttft_p90_ms"], row["ttft_p99_ms"]) == (90.0, 100.0)
    assert (row["prefill_p50_ms"], row["rest_p50_ms"]) == (pytest.approx(33.0), pytest.approx(22.0))
    assert row["paths"] == {"readback": 9, "recompute: miss": 1}


def test_turns_that_left_the_path_of_their_mode_are_counted_but_for_a_planners_and_a_replays() -> None:
    lost = turn(path="recompute")
    auto, replayed = replace(lost, mode=Mode.AUTO), replace(lost, source="talk.json")
    assert strays([lost, lost, turn(), auto, replayed]) == {"on by recompute": 2}


def test_ratios_are_between_medians_of_one_point() -> None:
    turns = [turn(mode, ttft) for mode in (Mode.ON, Mode.STOCK) for ttft in (90.0, 110.0, 500.0)]
    turns += [turn(Mode.OFF, 440.0), turn(Mode.APPEND, 50.0), turn(Mode.AUTO, 55.0, path="append")]
    turns += [turn(Mode.AUTO, 1.0, length=4096)]
    here, there = ratios(summary(turns))
    assert here["readback_to_stock"] == 1.0
    assert here["auto_to_stock"] == 0.5
    assert here["auto_to_best_path"] == 1.1
    assert (here["readback_to_recompute"], here["stock_to_recompute"]) == (0.25, 0.25)
    assert there == {
        "last": False,
        "source": "",
        "turn": 2,
        "length": 4096,
        "suffix": 128,
        "conversations": 1,
        "think_s": 0.0,
    }


def test_the_limit_is_what_an_append_takes_and_the_bytes_at_the_links_rate() -> None:
    turns = [turn(Mode.APPEND, 60.0), turn(Mode.ON, 140.0, bytes=4e9), turn(Mode.OFF, 300.0, bytes=1e6)]
    (limit,) = limits(summary(turns), link_gb_s=400.0)
    assert (limit["mode"], limit["suffix_ms"], limit["link_ms"]) == ("on", 60.0, 10.0)
    assert (limit["limit_ms"], limit["ttft_to_limit"]) == (70.0, 2.0)
    assert limits(summary([turn(Mode.ON, bytes=4e9)]), 400.0) == []


def test_two_records_are_compared_by_mode_and_point() -> None:
    first = summary([turn(Mode.ON, 100.0), turn(Mode.OFF, 300.0)])
    (row,) = compared(first, summary([turn(Mode.ON, 80.0), turn(Mode.ON, 80.0, think_s=5.0)]))
    assert (row["mode"], row["ratio"], row["p99_ratio"]) == ("on", 0.8, 0.8)


async def test_handshakes_are_told_by_their_mean_over_the_sidecars() -> None:
    told = iter(('sum{outcome="done"} 0.2', 'sum{outcome="done"} 0.4'))

    async def metrics(_: web.Request) -> web.Response:
        lines = [
            next(told),
            'count{outcome="done"} 1.0',
            'sum{outcome="failed"} 9.0',
            'count{outcome="late"} 7.0',
        ]
        return web.Response(text="".join(f"kvlease_handshake_seconds_{line}\n" for line in lines))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = str(server.make_url("")).rstrip("/")
        assert await handshakes(session, (url, url)) == {"count": 2.0, "mean_ms": pytest.approx(300.0)}


# --- charts ---------------------------------------------------------------------------------------------------


class Drawn:
    """Remembers what was drawn, in place of matplotlib's figure and axes alike."""

    def __init__(self, **_: Any) -> None:
        self.axes: list[Drawn] = []
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def subplots(self, _rows: int, columns: int) -> list["Drawn"]:
        self.axes = [Drawn() for _ in range(columns)]
        return self.axes

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: self.calls.append((name, arguments, options))

    def labels(self, of: str) -> list[str]:
        return [options["label"] for name, _, options in self.calls if name == of]


def test_charts_show_ttft_by_length_and_the_prefill_leg_split(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = Drawn()
    module = type("module", (), {"Figure": lambda **_: figure})
    monkeypatch.setattr(charts, "figure_module", lambda: module)
    turns = [turn(length=length, prefill_transfer_ms=20.0) for length in (8192, 4096)]
    turns += [
        turn(Mode.OFF, 300.0),
        turn(Mode.APPEND, 50.0, prefill_ms=0.0),
        turn(ttft_ms=7.0, conversations=4),
    ]
    charts.plot(summary(turns), tmp_path / "chart.png")
    left, right = figure.axes
    assert left.labels("plot") == ["off", "on", "append"]
    assert [arguments[:2] for name, arguments, _ in left.calls if name == "plot"][1] == (
        (4096, 8192),
        (100.0, 100.0),
    )
    assert right.labels("bar") == ["off: prefill", "on: prefill", "on: KV transfer"]
    assert [arguments[1] for name, arguments, _ in right.calls if name == "bar"][1:] == [
        (40.0, 40.0),
        (20.0, 20.0),
    ]
    saved = [arguments[0].name for name, arguments, _ in figure.calls if name == "savefig"]
    assert saved == ["chart.png", "chart.svg"]


def test_charts_without_matplotlib_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(charts, "import_module", lambda _: __import__("no_such_module_as_matplotlib"))
    assert bench("--plot", "chart", "--dry-run") == 1
    assert "kvlease[bench]" in capsys.readouterr().err


# --- the record -----------------------------------------------------------------------------------------------


def test_a_record_goes_on_with_what_it_has_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = Record(path, resume=False)
    record.agree({"output_tokens": 32})
    record.add([turn(cell="on/8192+128x1#0")])
    again = Record(path, resume=True)
    assert again.done == {"on/8192+128x1#0"}
    again.agree({"output_tokens": 32, "engines": "started"})
    with pytest.raises(InvalidArgument, match=r"measured with output_tokens 32, not 64.*another --output"):
        again.agree({"output_tokens": 64})
    again.add([turn(cell="on/8192+128x1#1")])
    document = read_record(path)
    assert document["settings"] == {"output_tokens": 32, "engines": "started"}
    assert [one.cell for one in document["turns"]] == ["on/8192+128x1#0", "on/8192+128x1#1"]
    assert document["summary"][0]["turns"] == 2


@pytest.mark.parametrize(
    ("name", "why"), [("", "is a directory"), ("none/record.json", "there is no directory")]
)
def test_a_record_that_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Record(tmp_path / name, resume=False)


@pytest.mark.parametrize("text", ["", "[]", '{"turns": [{"mode": "on"}]}', '{"turns": [{"mode": "none"}]}'])
def test_a_file_that_is_no_record_is_neither_resumed_nor_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    assert bench("--output", str(path), "--resume") == 1
    parser = ArgumentParser()
    compare.add_arguments(parser)
    assert compare.run(parser.parse_args([str(path), str(path)])) == 1
    assert capsys.readouterr().err.count("is no record of this benchmark") == 2
    assert path.read_text() == text


def test_a_comparison_says_what_differs_and_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tokens, modes in (("a", 32, (Mode.ON, Mode.OFF)), ("b", 64, (Mode.ON,))):
        record = Record(tmp_path / name, resume=False)
        record.agree({"output_tokens": tokens})
        record.add([turn(mode) for mode in modes])
    parser = ArgumentParser()
    compare.add_arguments(parser)
    assert compare.run(parser.parse_args([str(tmp_path / "a"), str(tmp_path / "b")])) == 0
    told = capsys.readouterr()
    assert "the records differ in output_tokens: 32 and 64" in told.err
    assert "1 points of the first record are not in the other" in told.err
    assert [line.split()[:3] for line in told.out.splitlines()[1:]] == [["on", "2", "8192"]]


# --- streams beside turns -------------------------------------------------------------------------------------


class Turns(Experiment):
    """Turns of a cell: each ends when `end` says so, or fails."""

    def __init__(self, end: Callable[[int], Awaitable[None]]) -> None:
        super().__init__(sweep(Mode.ON))
        self.ended = asyncio.Event()
        self._end = end
        self._begun = 0

    async def run(self, running: Running, cell: Cell) -> list[TurnStats]:
        self._begun += 1
        await self._end(self._begun)
        self.ended.set()
        return [turn(cell.mode)]


class Streams:
    """Streams whose tokens come 10 ms apart, and 30 ms apart while turns are beside them."""

    def __init__(self, quiet: int, until: asyncio.Event) -> None:
        self._quiet = quiet
        self._until = until
        self._begun = 0

    async def turn(
        self, conversation_id: str, prompt: Sequence[int], tokens: int, *, stream: bool, salt: str = ""
    ) -> Reply:
        self._begun += 1
        busy = self._begun > self._quiet
        if busy:
            await self._until.wait()
        apart_s = 0.03 if busy else 0.01
        return Reply(arrivals_s=[apart_s * number for number in range(tokens)])


async def streamed(turns: Turns, until: asyncio.Event) -> dict[str, Any]:
    plan = StreamPlan(count=2, tokens=3)
    async with aiohttp.ClientSession() as session:
        running = Running(session, (), (), {Mode.ON: Streams(2, until)}, "model", 1000)
        return await beside_turns(running, turns, plan, plan.cell(sweep(Mode.ON), Mode.ON))


async def forever(_: int) -> None:
    await asyncio.Event().wait()


async def test_the_time_between_tokens_is_told_with_how_many_turns_were_beside() -> None:
    async def two_end(number: int) -> None:
        if number > 2:
            await forever(number)

    turns = Turns(two_end)
    row = await streamed(turns, turns.ended)
    assert (row["length"], row["suffix"], row["turns"], row["paths"]) == (4096, 128, 2, ["readback"])
    assert (row["quiet_p99_ms"], row["busy_p50_ms"]) == (pytest.approx(10), pytest.approx(30))
    assert row["p99_ratio"] == pytest.approx(3)


async def test_a_turn_that_fails_beside_streams_is_no_quiet_stream() -> None:
    async def fails(_: int) -> None:
        raise TurnFailedError("the router answered 503")

    with pytest.raises(TurnFailedError, match="answered 503"):
        await streamed(Turns(fails), asyncio.Event())


async def test_streams_that_ended_before_any_turn_tell_nothing() -> None:
    over = asyncio.Event()
    over.set()
    with pytest.raises(TurnFailedError, match="no turn ended while 2 streams made 3 tokens each"):
        await streamed(Turns(forever), over)


# --- the command ----------------------------------------------------------------------------------------------


def bench(*flags: str) -> int:
    parser = ArgumentParser()
    main.add_arguments(parser)
    return main.run(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--router-url", "http://r:1"), "--prefill-url and --decode-url: both are needed"),
        (("--prefill-url", "http://p:1"), "--prefill-url and --decode-url: both are needed"),
        (
            (*ATTACHED, "--router-url", "http://r:1", "--modes", "on,off"),
            "one mode, by their router's settings",
        ),
        ((*ATTACHED, "--modes", "on"), "all other modes with it"),
        ((*ATTACHED, "--router-url", "http://r:1", "--modes", "stock"), "without --router-url"),
        ((*ATTACHED, "--prefill-url", "http://p:2"), "one --prefill-url and one --decode-url"),
        ((*ATTACHED, "--side-by-side"), "--side-by-side is for engines that are started"),
        ((*ATTACHED, "--vocabulary", "2"), "--vocabulary must be at least 8"),
        (("--vocabulary", "2000"), "--vocabulary is for engines that run already"),
        (("--gpus", "0"), "gpus: 1 given"),
        (("--streams", "-1"), "streams (-1) must not be below 0"),
        (("--streams", "2", "--stream-tokens", "1"), "stream_tokens (1) at least 2"),
        (("--think-s", "nan"), "think_s must be a number of seconds"),
        (("--think-s", "1,1"), "think_s: at least one, and each once"),
        (("--repeats", "0"), "repeats (0)"),
        (("--link-gb-s", "-1"), "--link-gb-s must be above 0"),
        (("--plot", "/no/such/directory/chart"), "there is no directory /no/such/directory"),
        (("--resume",), "--resume needs --output"),
        (("--model", "/no/such/model"), "/no/such/model/config.json tells no vocab_size"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], names: str
) -> None:
    monkeypatch.setattr("kvlease.bench.multiturn.flags.ensure_engine_environment", lambda _: Path("python"))
    assert bench(*flags) == 1
    assert names in capsys.readouterr().err


def test_a_dry_run_names_what_is_left_streams_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    flags = ("--modes", "on,stock", "--points", "8+2", "--repeats", "1", "--streams", "4", "--dry-run")
    assert bench(*flags) == 0
    assert capsys.readouterr().out.split() == [
        *("on/8+2x1#0", "stock/8+2x1#0"),
        *("streams/on/8+2x1", "streams/stock/8+2x1"),
    ]
    record = Record(path, resume=False)
    row = {"mode": "stock", "length": 8, "suffix": 2, "streams": 4, "stream_tokens": 400, "p99_ratio": 1.0}
    record.add_streams(row)
    record.add([turn(cell="on/8+2x1#0")])
    assert bench(*flags, "--output", str(path), "--resume") == 0
    assert capsys.readouterr().out.split() == ["stock/8+2x1#0", "streams/on/8+2x1"]


def test_a_stock_cell_whose_prefill_engine_read_nothing_is_no_readback() -> None:
    cell = Cell(Mode.STOCK, 8, 2, 1, 0)
    main.require_read_back(cell, [turn(Mode.STOCK, bytes=10.0, prefill_bytes=8.0)])
    # The decode engine READs what was computed anew, also where nothing was read back.
    with pytest.raises(TurnFailedError, match="READ nothing back"):
        main.require_read_back(cell, [turn(Mode.STOCK, bytes=10.0)])
