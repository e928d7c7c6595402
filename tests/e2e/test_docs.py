"""The commands in README.md and the pages of docs/, run against a stack over simulated engines.

A block ```console run holds commands after `$ ` (continued by `> `) and what they print; one of ```python run is a
program, and the ```text block after it is what it prints. `...` stands for any text.
"""

import asyncio
import doctest
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kvlease.dev.engine_process import free_ports
from kvlease.runtime.child_process import tied_to_this_process

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
START_S = 90.0
COMMAND_S = 120.0
BLOCK = re.compile(r"^```(?P<kind>\w+)(?P<run> run)?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Step:
    """A command, and what it prints."""

    command: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Served:
    """Where the router and the registry of the stack listen."""

    router: str
    registry: str


def blocks(page: Path) -> list[tuple[str, bool, str]]:
    """Kind, whether it is run, and text of every fenced block."""
    return [(m["kind"], m["run"] is not None, m["body"]) for m in BLOCK.finditer(page.read_text())]


def steps(page: Path) -> list[Step]:
    found: list[Step] = []
    listed = blocks(page)
    for position, (kind, run, body) in enumerate(listed):
        if run and kind == "console":
            found += [Step(("bash", "-o", "pipefail", "-ec", command), out) for command, out in session(body)]
        elif run:
            assert kind == "python", f"{page.name}: a block of {kind} cannot be run"
            printed = listed[position + 1]
            assert printed[0] == "text", f"{page.name}: what the program prints is missing"
            found.append(Step((sys.executable, "-c", body), printed[2]))
    return found


def session(body: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with its output."""
    found: list[tuple[str, str]] = []
    for line in body.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:], ""))
        elif line.startswith("> ") and not found[-1][1]:
            found[-1] = (found[-1][0] + line[2:], "")
        else:
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    options = ("--engine", "sim", "--store", "memory", "--port", str(port))
    process = await asyncio.create_subprocess_exec(
        *tied_to_this_process((sys.executable, "-m", "kvlease.cli", "dev", *options)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    drained: asyncio.Task[bytes] | None = None
    try:
        registry = await _registry_of(process)
        assert process.stdout is not None
        # A process whose output nobody takes stops at some point.
        drained = asyncio.create_task(process.stdout.read())
        yield Served(f"127.0.0.1:{port}", registry)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(START_S):
            await (drained or process.communicate())
            await process.wait()


async def _registry_of(process: asyncio.subprocess.Process) -> str:
    """Waits until the stack stays up; the address that it told of its registry."""
    assert process.stdout is not None
    told = ""
    async with asyncio.timeout(START_S):
        while "stays up" not in told:
            line = await process.stdout.readline()
            assert line, told
            told += line.decode()
    found = re.search(r"registry at (\S+),", told)
    assert found is not None, told
    return found[1]


async def output_of(step: Step, served: Served) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "KVLEASE_REGISTRY": served.registry,
    }
    process = await asyncio.create_subprocess_exec(
        *(part.replace("127.0.0.1:8000", served.router) for part in step.command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), COMMAND_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{step.command[-1]}\n{output.decode()}{errors.decode()}"
    return output.decode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=lambda page: page.stem)
async def test_the_commands_of_a_page_print_what_it_says(page: Path, served: Served) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for step in steps(page):
        output = await output_of(step, served)
        same = doctest.OutputChecker().check_output(step.expected, output, flags)
        assert same, f"{step.command[-1]}\nprints\n{output}\nbut the page says\n{step.expected}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_of_a_page_are_python(page: Path) -> None:
    for kind, _, body in blocks(page):
        if kind == "python":
            compile(body, page.name, "exec")


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*/README.md"), *ROOT.glob("docs/*/README.md")], ids=str)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_readme_getting_started_and_recipes_have_commands_that_are_run() -> None:
    run = {page.stem for page in PAGES if steps(page)}
    assert {"README", "getting-started", "recipes"} <= run
