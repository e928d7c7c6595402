"""`kvlease bench router`: what a router adds to a turn of two legs, beside its peers, over engines that answer at once.

Every router is measured in one run, over the same engines and by the same client: `direct` is that client asking
both engines itself, and what a router adds is counted from there. All have to share the machine with client and
engines, so that latencies depend on how many cores it has; the CPU of a request does not.
"""

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from os import getloadavg
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from kvlease.bench.machine import machine
from kvlease.bench.router_fakes import EVENTS_A_STREAM, MODEL, FakeFleet
from kvlease.bench.router_load import Load, drive
from kvlease.bench.router_subjects import OURS, Subject, require_installed, started, stop
from kvlease.core.errors import InvalidArgument

PROMPTS_KB = (2, 100)
CONCURRENCIES = (1, 16)
KNOWN_CONVERSATIONS = 10_000
KNOWN_CONCURRENCY = 8
KNOWN_TIMEOUT_S = 300.0
RIVAL = "vllm-router"
DIRECT = "direct"
FILLER = "The lamp turns once in nine seconds and is seen from eighteen miles away. "


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of load."""

    concurrency: int
    prompt_kb: int
    stream: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What one router did with one kind of load.

    Attributes:
        added_p50_ms: to the last byte of the answer, from what the engines take without a router.
        cpu_us_per_event: CPU of a streamed request beyond that of a whole one, for each event; None of a whole one.
    """

    name: str
    concurrency: int
    prompt_kb: int
    stream: bool
    added_p50_ms: float
    added_p99_ms: float
    requests_per_s: float
    cpu_us_per_request: float
    cpu_us_per_event: float | None
    ttfb_p50_ms: float
    rss_mib: float
    requests: int
    failed: int


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease bench router`."""
    parser.add_argument("--against", default="", metavar="NAME,...", help="peers: vllm-router, smg, example")
    parser.add_argument("--duration", type=float, default=3.0, metavar="S", help="seconds of each load")
    parser.add_argument("--known", type=int, default=KNOWN_CONVERSATIONS, help="conversations known before")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what is printed")


def run(arguments: Namespace) -> int:
    """Measures and prints. The exit status: 0 when every goal was met, 1 when not, 2 when it cannot be measured."""
    peers = [name.strip() for name in arguments.against.split(",") if name.strip()]
    try:
        for name in peers:
            require_installed(name)
        results = uvloop.run(measure([OURS, *peers], arguments.duration, arguments.known))
    except InvalidArgument as error:
        sys.stderr.write(f"kvlease bench router: {error}\n")
        return 2
    goals = judge(results)
    document = {
        "what": "what a router adds to a turn of two legs over engines that answer at once",
        "command": f"kvlease bench router --against {','.join(peers)} --duration {arguments.duration:g} --output json",
        "machine": machine(),
        "load_average": getloadavg(),
        "known_conversations": arguments.known,
        "events_per_stream": EVENTS_A_STREAM + 4,
        "goals": goals,
        "results": [asdict(result) for result in results],
    }
    text = json.dumps(document, indent=2) if arguments.output == "json" else table(results)
    sys.stdout.write(text + "\n")
    return 0 if all(goal["met"] for goal in goals) else 1


async def measure(names: Sequence[str], duration_s: float, known: int) -> list[Result]:
    """Every router under every load, one router at a time.

    Raises:
        InvalidArgument: a router cannot be started.
    """
    cells = [
        Cell(concurrency, prompt_kb, stream)
        for prompt_kb in PROMPTS_KB
        for concurrency in CONCURRENCIES
        for stream in (False, True)
    ]
    with TemporaryDirectory(prefix="kvlease-bench-") as directory:
        async with _fakes(Path(directory)) as fleet:
            legs = [fleet.prefill, fleet.decode]
            direct = {cell: await _load(legs, cell, duration_s) for cell in cells}
            results: list[Result] = []
            for name in names:
                async with started(name, fleet, Path(directory) / f"{name}.log") as subject:
                    await _make_known(subject, known)
                    results += await _measure_one(subject, cells, direct, duration_s)
            return results


def judge(results: Sequence[Result]) -> list[dict[str, object]]:
    """Our goals against the rival: not above it at 2 KB, and below it at 100 KB."""
    of = {(one.name, one.concurrency, one.prompt_kb, one.stream): one for one in results}
    goals: list[dict[str, object]] = []
    for (name, concurrency, prompt_kb, stream), ours in of.items():
        rival = of.get((RIVAL, concurrency, prompt_kb, stream)) if name == OURS else None
        if rival is None:
            continue
        figures = ["added_p50_ms", "cpu_us_per_request"] if ours.concurrency == 1 else ["cpu_us_per_request"]
        for figure in (*figures, "cpu_us_per_event"):
            mine, theirs = getattr(ours, figure), getattr(rival, figure)
            if mine is None or theirs is None:
                continue
            goals.append(
                {
                    "figure": figure,
                    "concurrency": ours.concurrency,
                    "prompt_kb": ours.prompt_kb,
                    "stream": ours.stream,
                    "ours": mine,
                    RIVAL: theirs,
                    "met": mine <= theirs,
                }
            )
    return goals


def table(results: Sequence[Result]) -> str:
    """The results for a reader."""
    head = "name          conc  KB stream   added p50    p99 ms    req/s  cpu us/req  us/event  ttfb p50 ms   MiB"
    lines = [
        f"{r.name:12} {r.concurrency:5} {r.prompt_kb:3} {r.stream!s:6} {r.added_p50_ms:11.3f} {r.added_p99_ms:9.3f}"
        f" {r.requests_per_s:8.0f} {r.cpu_us_per_request:11.0f}"
        f" {'' if r.cpu_us_per_event is None else format(r.cpu_us_per_event, '.1f'):>9}"
        f" {r.ttfb_p50_ms:12.3f} {r.rss_mib:5.0f}"
        for r in results
    ]
    return "\n".join([head, *lines])


async def _measure_one(
    subject: Subject, cells: Sequence[Cell], direct: dict[Cell, Load], duration_s: float
) -> list[Result]:
    results: list[Result] = []
    whole_us: dict[tuple[int, int], float] = {}
    for cell in cells:
        before_s = subject.cpu_s()
        load = await _load([subject.url], cell, duration_s)
        requests = len(load.answer_s)
        if not requests:
            raise InvalidArgument(f"{subject.name} answered none of {load.failed} requests")
        cpu_us = (subject.cpu_s() - before_s) * 1e6 / requests
        place = cell.concurrency, cell.prompt_kb
        if not cell.stream:
            whole_us[place] = cpu_us
        event_us = (cpu_us - whole_us[place]) / (EVENTS_A_STREAM + 4) if cell.stream else None
        base = direct[cell]
        results.append(
            Result(
                name=subject.name,
                concurrency=cell.concurrency,
                prompt_kb=cell.prompt_kb,
                stream=cell.stream,
                added_p50_ms=_ms(_quantile(load.answer_s, 0.5) - _quantile(base.answer_s, 0.5)),
                added_p99_ms=_ms(_quantile(load.answer_s, 0.99) - _quantile(base.answer_s, 0.99)),
                requests_per_s=round(requests / load.elapsed_s, 1),
                cpu_us_per_request=round(cpu_us, 1),
                cpu_us_per_event=None if event_us is None else round(event_us, 2),
                ttfb_p50_ms=_ms(_quantile(load.first_byte_s, 0.5)),
                rss_mib=round(subject.rss_mib(), 1),
                requests=requests,
                failed=load.failed,
            )
        )
    return results


async def _load(legs: list[str], cell: Cell, duration_s: float) -> Load:
    return await drive(legs, _bodies(cell.prompt_kb, stream=cell.stream), cell.concurrency, duration_s)


async def _make_known(subject: Subject, known: int) -> None:
    if not known:
        return
    bodies = _bodies(PROMPTS_KB[0], stream=False)
    await drive([subject.url], bodies, KNOWN_CONCURRENCY, KNOWN_TIMEOUT_S, count_max=known)


_SERIAL = count()


def _bodies(prompt_kb: int, *, stream: bool) -> Callable[[int], bytes]:
    """Bodies of so many KB, each the first turn of a conversation of its own, with a long head that all share."""
    series = next(_SERIAL)
    system = (FILLER * (prompt_kb * 1024 // len(FILLER) + 1))[: prompt_kb * 1024 - 300]
    whole = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "SERIAL: what is seen?"},
        ],
        "max_tokens": EVENTS_A_STREAM,
        "temperature": 0.7,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    before, _, after = json.dumps(whole).encode().partition(b"SERIAL")
    return lambda number: b"%b%d-%d%b" % (before, series, number, after)


@asynccontextmanager
async def _fakes(directory: Path) -> AsyncGenerator[FakeFleet]:
    with (directory / "fakes.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvlease.bench.router_fakes", stdout=asyncio.subprocess.PIPE, stderr=log
        )
    try:
        line = await process.stdout.readline() if process.stdout is not None else b""
        if not line:
            raise InvalidArgument(f"no engines: {(directory / 'fakes.log').read_text()[-500:]}")
        yield FakeFleet(**json.loads(line))
    finally:
        await stop(process)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
