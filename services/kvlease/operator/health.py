"""`kvlease health`: whether processes can do their work, as an exit status for containers and probes."""

import asyncio
import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease.operator.command import (
    Exit,
    OperatorError,
    Row,
    add_common_flags,
    host_port,
    perform,
    show,
)
from kvlease.operator.connection import Fleet, fleet
from kvlease.runtime.identity import Identity

COLUMNS = ("process", "address", "status", "detail")
ENVIRONMENT = {
    "registry": "KVLEASE_REGISTRY",
    "router": "KVLEASE_ROUTER",
    "sidecar": "KVLEASE_SIDECAR",
}
"""Where an address comes from when no flag names any."""


@dataclass(frozen=True, slots=True)
class Health:
    """What became of one check."""

    process: str
    address: str
    exit: Exit
    detail: str

    def row(self) -> Row:
        """What is shown of it."""
        words = {Exit.OK: "ok", Exit.PROBLEM: "not serving", Exit.UNREACHABLE: "unreachable"}
        return {
            "process": self.process,
            "address": self.address,
            "status": words[self.exit],
            "detail": self.detail,
        }


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease health`."""
    for flag in ("--registry", "--sidecar"):
        meaning = f"a {flag.removeprefix('--')}'s gRPC address"
        parser.add_argument(
            flag, type=host_port, action="append", default=[], metavar="HOST:PORT", help=meaning
        )
    parser.add_argument("--router", action="append", default=[], metavar="URL", help="a router's base URL")
    parser.add_argument(
        "--live",
        action="store_true",
        help="be content with a router that answers, also while no decode engine is registered",
    )
    add_common_flags(parser)
    parser.epilog = (
        f"Each flag may be given several times. Without any, {', '.join(ENVIRONMENT.values())} name what is "
        "asked. Exit status: 0 all serve, 1 one answers but does not serve, 2 usage, 3 one does not answer."
    )


def run(arguments: Namespace) -> int:
    """Asks every process that was named. The exit status is the worst one."""
    return perform("health", _check, arguments)


async def _check(arguments: Namespace) -> int:
    named = {process: list(getattr(arguments, process)) for process in ENVIRONMENT}
    if not any(named.values()):
        named = {process: _from_environment(variable) for process, variable in ENVIRONMENT.items()}
    if not any(named.values()):
        raise OperatorError("name what to ask: --registry, --router or --sidecar", Exit.USAGE)
    async with fleet(arguments) as ways:
        found = await asyncio.gather(
            *(_ask_grpc(ways, Identity.REGISTRY, "registry", address) for address in named["registry"]),
            *(_ask_grpc(ways, Identity.SIDECAR, "sidecar", address) for address in named["sidecar"]),
            *(_ask_router(ways, url, live=arguments.live) for url in named["router"]),
        )
    show([health.row() for health in found], COLUMNS, arguments.output)
    return max(health.exit for health in found)


def _from_environment(variable: str) -> list[str]:
    value = os.environ.get(variable, "")
    return [value] if value else []


async def _ask_grpc(ways: Fleet, peer: Identity, process: str, address: str) -> Health:
    stub = cast(Any, health_pb2_grpc).HealthStub(await ways.channel(peer, address))
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ways.timeout_s)
    except grpc.aio.AioRpcError as error:
        return Health(process, address, Exit.UNREACHABLE, f"no answer ({error.code().name})")
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Health(process, address, Exit.OK if serving else Exit.PROBLEM, status.lower())


async def _ask_router(ways: Fleet, url: str, *, live: bool) -> Health:
    context = ways.tls.client_context() if ways.tls is not None else True
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ways.timeout_s)) as session,
            session.get(url.rstrip("/") + "/health", ssl=context) as response,
        ):
            body: Any = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Health("router", url, Exit.UNREACHABLE, f"no answer ({type(error).__name__})")
    able = response.status == 200
    said = cast("dict[str, Any]", body).get("status") if isinstance(body, dict) else None
    detail = str(said or f"HTTP {response.status}")
    return Health("router", url, Exit.OK if able or live else Exit.PROBLEM, detail)
