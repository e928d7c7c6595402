"""`kvlease dev`: the whole system on this machine, and a conversation of three turns through it."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TextIO

import aiohttp
import uvloop

from kvlease.core.errors import InvalidArgument
from kvlease.core.records import EngineRole
from kvlease.dev.check import CheckResult, Target, run_check
from kvlease.dev.completion import RequestFailedError
from kvlease.dev.engine_env import EngineEnvironmentError, ensure_engine_environment
from kvlease.dev.engine_process import (
    BLOCK_TOKENS,
    PATIENT_CONNECTOR,
    Device,
    EngineProcess,
    EngineProcessError,
    EngineSpec,
)
from kvlease.dev.engine_process import EngineRole as ProcessRole
from kvlease.dev.refusal import why_refused
from kvlease.dev.report import turn_table
from kvlease.dev.sim_process import SimEngineSpec
from kvlease.dev.stack import Engine, EngineSeat, MakeEngine, Stack, StackError, StackPlan
from kvlease.dev.tiny_model import ensure_tiny_model
from kvlease.dev.warm import warm_handshakes
from kvlease.router.config import RouterConfig
from kvlease.runtime.logging import LogFormat, LogLevel, configure_logging
from kvlease.store.port import StoreKind

DEFAULT_PORT = 8000
SERVED_MODEL = "tiny-qwen3"
EXTRA_ARGUMENTS = ("--enable-prompt-tokens-details",)
EXIT_INTERRUPTED = 130
PATIENT = RouterConfig(stall_s=240.0, probe_timeout_s=60.0, prefill_timeout_s=300.0, provisional_s=20.0)
"""Engines of the CPU build share few cores, on which they also spin: one that is slow has not stalled, and a turn may
be confirmed late."""

BUSY_LOAD_PER_CORE = 3.0
"""Load from which on a failure is said to come perhaps from the machine alone."""

FAILURES = (
    StackError,
    EngineProcessError,
    RequestFailedError,
    InvalidArgument,
    aiohttp.ClientError,
    TimeoutError,
)

Progress = Callable[[str], None]


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease dev`."""
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="real vLLM, or the simulated engine"
    )
    parser.add_argument(
        "--prefill", type=_engines, default=1, metavar="N", help="prefill engines (default: 1)"
    )
    parser.add_argument("--decode", type=_engines, default=1, metavar="M", help="decode engines (default: 1)")
    parser.add_argument(
        "--device",
        type=Device,
        choices=tuple(Device),
        default=Device.CPU,
        help="cpu: vLLM's CPU build in an environment of its own; cuda: the vLLM that --engine-python has, "
        "one GPU per engine (default: cpu)",
    )
    parser.add_argument(
        "--engine-python", type=Path, default=Path(sys.executable), help="interpreter that has vLLM, for cuda"
    )
    parser.add_argument(
        "--engine-arguments",
        type=shlex.split,
        default=[],
        help="more arguments of `vllm serve`, in one string",
    )
    parser.add_argument("--model", type=Path, help="model directory (default: a tiny one that is generated)")
    parser.add_argument(
        "--port",
        type=_port,
        help=f"port of the OpenAI API (default: {DEFAULT_PORT}; with --check any free one)",
    )
    parser.add_argument(
        "--store",
        choices=("memory", "etcd"),
        default="etcd",
        help="where leases are remembered: in an etcd that it starts (default), or in this process",
    )
    parser.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="http://host:port of an OTLP/gRPC collector that gets the traces of every part and engine",
    )
    parser.add_argument(
        "--check", action="store_true", help="run the turns, stop everything, exit 0 only if all is right"
    )
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what --check prints")
    parser.add_argument(
        "--connector-module",
        default="kvlease_vllm.connector",
        help="module of KvleaseConnector; for tests of --check",
    )
    parser.add_argument("--connector-path", type=Path, help="folder to import that module from")
    parser.add_argument(
        "--log-level",
        type=LogLevel,
        choices=tuple(LogLevel),
        default=LogLevel.WARNING,
        help="log level of registry, router and sidecars",
    )


def run(arguments: Namespace) -> int:
    """Runs the system; the exit status: 0 when every turn was right, 2 when it cannot be had as asked for."""
    progress = _progress_to(sys.stderr if arguments.output == "json" else sys.stdout)
    port = arguments.port if arguments.port is not None else (0 if arguments.check else DEFAULT_PORT)
    refusal = why_refused(arguments, port)
    if refusal:
        print(f"kvlease dev: {refusal}", file=sys.stderr)
        return 2
    configure_logging(arguments.log_level, LogFormat.TEXT)
    try:
        make_engine = _engine_maker(arguments, progress)
    except EngineEnvironmentError as error:
        return _fail(arguments, error)
    return uvloop.run(_run(arguments, make_engine, progress, port))


async def _run(arguments: Namespace, make_engine: MakeEngine, progress: Progress, port: int) -> int:
    """Brings the system up, holds the conversation, and stays up unless it was a check."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    logs = Path(tempfile.mkdtemp(prefix="kvlease-logs-"))
    stack = Stack(_plan(arguments, make_engine, port, logs), progress)
    conversation_id = f"dev-{uuid.uuid4().hex[:8]}"
    keeps_logs = False
    try:
        result = await _unless_stopped(stop, _converse(stack, conversation_id, progress, arguments.check))
        if result is None:
            return EXIT_INTERRUPTED
        keeps_logs = not result.ok
        if keeps_logs:
            progress(f"the engines' logs are kept in {logs}")
        if arguments.check:
            _print_result(result, arguments.output, logs)
        else:
            print(turn_table(result.turns), flush=True)
            _print_invitation(stack, conversation_id)
            await stop.wait()
        return 0 if result.ok else 1
    except FAILURES as error:
        keeps_logs = _holds_files(logs)
        return _fail(arguments, error, logs if keeps_logs else None)
    finally:
        progress("stopping everything")
        await stack.stop()
        if not keeps_logs:
            shutil.rmtree(logs, ignore_errors=True)


def _plan(arguments: Namespace, make_engine: MakeEngine, port: int, logs: Path) -> StackPlan:
    """What a command line asks for."""
    slow = arguments.engine == "vllm" and arguments.device is Device.CPU
    return StackPlan(
        arguments.prefill,
        arguments.decode,
        make_engine,
        port,
        router=PATIENT if slow else RouterConfig(),
        store=StoreKind(arguments.store),
        log_directory=logs,
        otlp_endpoint=arguments.otlp_endpoint,
    )


async def _converse(stack: Stack, conversation_id: str, progress: Progress, check: bool) -> CheckResult:
    await stack.start()
    progress("warming the NIXL handshakes in both directions")
    await warm_handshakes(stack.router_url, SERVED_MODEL)
    return await run_check(_target(stack), conversation_id, progress, edited=check)


async def _unless_stopped(
    stop: asyncio.Event, work: Coroutine[None, None, CheckResult]
) -> CheckResult | None:
    """The result of `work`, or None when the person stopped it before its end."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.wait((task, stopped))


def _target(stack: Stack) -> Target:
    return Target(
        router_url=stack.router_url,
        engine_urls=stack.engine_urls(),
        cold_url=stack.engine_urls(EngineRole.DECODE)[0],
        model=SERVED_MODEL,
        block_size=BLOCK_TOKENS,
    )


def _engine_maker(arguments: Namespace, progress: Progress) -> MakeEngine:
    """How to make an engine of the chosen kind; prepares what it needs.

    Raises:
        EngineEnvironmentError: real vLLM cannot be installed here.
    """
    if arguments.engine == "sim":
        return partial(simulated_engine, otlp_endpoint=arguments.otlp_endpoint)
    cuda = arguments.device is Device.CUDA
    python = arguments.engine_python if cuda else ensure_engine_environment(progress)
    model = arguments.model or ensure_tiny_model()

    def make(seat: EngineSeat) -> Engine:
        return EngineProcess(
            EngineSpec(
                role=ProcessRole(seat.role.value),
                python=python,
                model=model,
                log_file=seat.log_file,
                port=seat.port,
                side_channel_port=seat.side_channel_port,
                socket_dir=seat.socket_dir,
                device=arguments.device,
                gpu=seat.number,
                served_model_name=SERVED_MODEL,
                kvlease_config=PATIENT_CONNECTOR,
                connector_module=arguments.connector_module,
                connector_path=arguments.connector_path,
                otlp_endpoint=arguments.otlp_endpoint,
                environment={"OTEL_SERVICE_NAME": f"vllm-{seat.role.value}"},
                extra_arguments=(*EXTRA_ARGUMENTS, *arguments.engine_arguments),
            )
        )

    return make


def simulated_engine(seat: EngineSeat, otlp_endpoint: str = "") -> Engine:
    """A simulated engine at a seat."""
    return EngineProcess(
        SimEngineSpec(
            role=ProcessRole(seat.role.value),
            python=Path(sys.executable),
            model=Path(SERVED_MODEL),
            log_file=seat.log_file,
            port=seat.port,
            side_channel_port=seat.side_channel_port,
            socket_dir=seat.socket_dir,
            served_model_name=SERVED_MODEL,
            otlp_endpoint=otlp_endpoint,
        )
    )


def _fail(arguments: Namespace, error: Exception, logs: Path | None = None) -> int:
    """Says why there is no result, for a person and, where a check's result is asked for in JSON, there, too."""
    told = {"kind": type(error).__name__, "message": str(error)}
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY_LOAD_PER_CORE * cores:
        told["hint"] = (
            f"the load of this machine is {load:.0f} on {cores} cores: engines may be too slow on it"
        )
    kept = {"logs": str(logs)} if logs is not None else {}
    print(f"kvlease dev: {told['kind']}: {error}", file=sys.stderr)
    for line in (told.get("hint"), f"the engines' logs are kept in {logs}" if kept else None):
        if line:
            print(f"kvlease dev: {line}", file=sys.stderr)
    if arguments.check and arguments.output == "json":
        document = {**CheckResult([]).to_json(), "error": told, **kept}
        print(json.dumps(document, indent=2), flush=True)
    return 1


def _print_result(result: CheckResult, output: str, logs: Path) -> None:
    """Prints the turns; where one of them has a problem JSON also names where the engines' logs are kept."""
    document = result.to_json() | ({} if result.ok else {"logs": str(logs)})
    print(json.dumps(document, indent=2) if output == "json" else turn_table(result.turns), flush=True)


def _print_invitation(stack: Stack, conversation_id: str) -> None:
    body = {
        "model": SERVED_MODEL,
        "conversation_id": "my-own",
        "max_tokens": 32,
        "messages": [{"role": "user", "content": "Hello"}],
    }
    url = stack.router_url
    print(f"\nThe system stays up until Ctrl-C. Try it:\n\n  curl -i {url}/v1/chat/completions \\")
    print(f"    -H 'content-type: application/json' -d '{json.dumps(body)}'\n")
    print(f"  this conversation         {url}/v1/kvlease/conversations/{conversation_id}")
    if stack.registry is not None and stack.router is not None:
        addresses = f"KVLEASE_REGISTRY={stack.registry.address} KVLEASE_ROUTING={stack.router.grpc_address}"
        if stack.etcd_endpoint:
            addresses += f" ETCD={stack.etcd_endpoint}"
        print(f"  operators' commands       export {addresses}; kvlease top")
    for name, admin_url in stack.admin_urls().items():
        print(f"  {name + ' metrics':25} {admin_url}/metrics")
    for seat, engine_url in zip(stack.seats, stack.engine_urls(), strict=True):
        name = f"{seat.role.value} engine {seat.number}"
        print(f"  {name:25} {engine_url}/metrics   log {seat.log_file}")
    sys.stdout.flush()


def _progress_to(stream: TextIO) -> Progress:
    began_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - began_s:5.1f} s] {message}", file=stream, flush=True)

    return progress


def _holds_files(directory: Path) -> bool:
    return any(directory.iterdir())


def _engines(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 16:
        raise ArgumentTypeError(f"{text!r} is not between 1 and 16 engines of a role")
    return int(text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise ArgumentTypeError(f"{text!r} is not a port between 0 and 65535")
    return int(text)
