"""A real Jaeger on this machine: built from its Go module once, then started with its spans in memory.

The binary lives in the user cache (`~/.cache/kvlease`, or `KVLEASE_CACHE`); it has no user interface, only the
receiver of OTLP/gRPC and the query API. `python -m kvlease.dev.jaeger` builds it if need be, serves until
Ctrl-C, and prints where.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvlease.dev.engine_env import cache_root
from kvlease.dev.engine_process import free_ports
from kvlease.runtime.child_process import tied_to_this_process

VERSION = "1.76.0"
MODULE = "github.com/jaegertracing/jaeger/cmd/jaeger"
HOST = "127.0.0.1"
TRACES_MAX = 10_000
READY_S = 60.0

Report = Callable[[str], None]


class JaegerError(RuntimeError):
    """Jaeger cannot be built or does not serve; the message says why."""


@dataclass(frozen=True)
class StoredSpan:
    """One span as the query API tells it; `parent_id` is empty for a root.

    Attributes:
        links: ids of trace and span of what it is linked to, its parent left out.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    tags: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()


class Jaeger:
    """One server on free ports. After `start`, `otlp_endpoint` takes spans and `query_url` is the API's base."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.otlp_endpoint = ""
        self.query_url = ""

    async def __aenter__(self) -> "Jaeger":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts the server and returns when it answers queries.

        Raises:
            JaegerError: it ended, or did not serve in time; the message ends with its last words.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="kvlease-jaeger-"))
        config, log_file = self._directory / "config.yaml", self._directory / "jaeger.log"
        otlp, query_http, query_grpc = free_ports(3)
        config.write_text(json.dumps(_config(otlp, query_http, query_grpc)))  # JSON is YAML
        self.otlp_endpoint, self.query_url = f"http://{HOST}:{otlp}", f"http://{HOST}:{query_http}"
        with log_file.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *tied_to_this_process([str(self._binary), "--config", f"file:{config}"]),
                env={name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(READY_S):
                await self._answers()
        except (TimeoutError, JaegerError) as error:
            last = "\n".join(log_file.read_text(errors="replace").splitlines()[-10:])
            await self.stop()
            raise JaegerError(f"Jaeger does not serve: {error or 'not in time'}\n{last}") from error

    async def stop(self) -> None:
        """Ends the server and forgets its spans; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # its spans are in memory: there is nothing to save
            await process.wait()
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    async def trace(self, trace_id: str) -> list[StoredSpan]:
        """The spans of a trace that have come so far."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.query_url}/api/traces/{trace_id}") as response,
        ):
            if response.status == 404:
                return []
            response.raise_for_status()
            body = await response.json()
        return [_stored(span, trace["processes"]) for trace in body["data"] for span in trace["spans"]]

    async def _answers(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                if self._process is None or self._process.returncode is not None:
                    raise JaegerError("the process ended")
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.query_url}/api/services") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)


def edges(spans: list[StoredSpan]) -> set[tuple[str, str]]:
    """Every parent -> child pair, each as `service: name`."""
    by_id = {span.span_id: span for span in spans}
    return {
        (f"{parent.service}: {parent.name}", f"{span.service}: {span.name}")
        for span in spans
        if (parent := by_id.get(span.parent_id)) is not None
    }


def ensure_jaeger(say: Report) -> Path:
    """The binary; builds it once, which takes minutes and downloads over 1 GB of Go modules.

    Raises:
        JaegerError: Go is missing, or the build failed.
    """
    target = cache_root() / f"jaeger-{VERSION}" / "jaeger"
    if target.is_file():
        return target
    go = shutil.which("go")
    if go is None:
        raise JaegerError(
            f"Jaeger {VERSION} is built from its Go module, and there is no Go here: install Go 1.24.6 or later "
            f"(https://go.dev/dl), or put a Jaeger binary at {target}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            say(f"building Jaeger {VERSION} with Go: downloads over 1 GB once, takes some minutes")
            _build(go, target)
    return target


def _build(go: str, target: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="build-", dir=target.parent))
    try:
        for command in (
            [go, "mod", "init", "scratch"],
            [go, "get", "-tool", f"{MODULE}@v{VERSION}"],
            [go, "build", "-o", str(scratch / "jaeger"), MODULE],
        ):
            done = subprocess.run(
                ["nice", "-n", "19", *command],
                cwd=scratch,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                last = "\n".join(done.stdout.splitlines()[-10:])
                raise JaegerError(f"{' '.join(command[:3])} exited with {done.returncode}\n{last}")
        (scratch / "jaeger").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _config(otlp: int, query_http: int, query_grpc: int) -> dict[str, Any]:
    """Spans go into memory as they come, without a batch, so that a query finds what was sent."""
    return {
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
            "telemetry": {"metrics": {"level": "none"}},
        },
        "extensions": {
            "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": TRACES_MAX}}}},
            "jaeger_query": {
                "storage": {"traces": "memory"},
                "http": {"endpoint": f"{HOST}:{query_http}"},
                "grpc": {"endpoint": f"{HOST}:{query_grpc}"},
            },
        },
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"{HOST}:{otlp}"}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
    }


def _stored(span: dict[str, Any], processes: dict[str, Any]) -> StoredSpan:
    trace_id, references = span["traceID"], span["references"]
    parent = next(
        (r for r in references if r["refType"] == "CHILD_OF" and r["traceID"] == trace_id), {"spanID": ""}
    )
    return StoredSpan(
        service=processes[span["processID"]]["serviceName"],
        name=span["operationName"],
        trace_id=trace_id,
        span_id=span["spanID"],
        parent_id=parent["spanID"],
        tags={tag["key"]: tag["value"] for tag in span["tags"]},
        links=tuple((r["traceID"], r["spanID"]) for r in references if r is not parent),
    )


async def _serve() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    binary = await asyncio.to_thread(ensure_jaeger, lambda message: print(message, file=sys.stderr))
    async with Jaeger(binary) as jaeger:
        print(f"spans    kvlease dev --otlp-endpoint {jaeger.otlp_endpoint}")
        print(f"queries  {jaeger.query_url}/api/traces?service=kvlease-router", flush=True)
        await stop.wait()


def main() -> int:
    """Serves until a signal; exit status 1 with the reason when it cannot."""
    try:
        asyncio.run(_serve())
    except JaegerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
