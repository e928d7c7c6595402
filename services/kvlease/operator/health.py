"""`kvlease health`: whether processes can do their work, as an exit status for containers and probes."""

import asyncio
import json
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease.operator.command import Exit, OperatorError, Row, perform, show
from kvlease.operator.connection import Fleet, fleet
from kvlease.operator.flags import add_common_flags, base_url, host_port
from kvlease.runtime.identity import Identity
from kvlease.v1 import registry_pb2, sidecar_pb2

COLUMNS = ("process", "address", "status", "detail")
ENVIRONMENT = {
    "registry": "KVLEASE_REGISTRY",
    "router": "KVLEASE_ROUTER",
    "sidecar": "KVLEASE_SIDECAR",
}
"""Where an address comes from when no flag names any."""

ADDRESSES: dict[str, Callable[[str], str]] = {"registry": host_port, "router": base_url, "sidecar": host_port}
"""What an address of each kind must look like."""

SERVICES = {
    Identity.REGISTRY: registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
    Identity.SIDECAR: sidecar_pb2.DESCRIPTOR.services_by_name["SidecarService"].full_name,
}
"""The gRPC service whose health is asked: a process that does not know it is of another kind."""


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
    for process, metavar, meaning in (
        ("registry", "HOST:PORT", "a registry's gRPC address"),
        ("sidecar", "HOST:PORT", "a sidecar's gRPC address"),
        ("router", "URL", "a router's base URL"),
    ):
        address = ADDRESSES[process]
        parser.add_argument(
            f"--{process}", type=address, action="append", default=[], metavar=metavar, help=meaning
        )
    parser.add_argument(
        "--live",
        action="store_true",
        help="be content with a router that answers, also while no decode engine is registered",
    )
    add_common_flags(parser)
    parser.epilog = (
        f"Each flag may be given several times. Without any, {', '.join(ENVIRONMENT.values())} name what is "
        "asked. Exit status: 0 all serve, 1 one answers but does not serve or is of another kind, 2 usage, 3 one "
        "does not answer."
    )


def run(arguments: Namespace) -> int:
    """Asks every process that was named. The exit status is the worst one."""
    return perform("health", _check, arguments)


async def _check(arguments: Namespace) -> int:
    named = {process: list(getattr(arguments, process)) for process in ENVIRONMENT}
    if not any(named.values()):
        named = {process: _from_environment(process) for process in ENVIRONMENT}
    if not any(named.values()):
        raise OperatorError("name what to ask: --registry, --router or --sidecar", Exit.USAGE)
    async with fleet(arguments) as ways:
        found = await asyncio.gather(
            *(_ask_grpc(ways, Identity.REGISTRY, address) for address in named["registry"]),
            *(_ask_grpc(ways, Identity.SIDECAR, address) for address in named["sidecar"]),
            *(_ask_router(ways, url, live=arguments.live) for url in named["router"]),
        )
    show([health.row() for health in found], COLUMNS, arguments.output)
    return max(health.exit for health in found)


def _from_environment(process: str) -> list[str]:
    variable = ENVIRONMENT[process]
    value = os.environ.get(variable, "")
    try:
        return [ADDRESSES[process](value)] if value else []
    except ArgumentTypeError as error:
        raise OperatorError(f"{variable}: {error}", Exit.USAGE) from error


async def _ask_grpc(ways: Fleet, peer: Identity, address: str) -> Health:
    process, request = (
        peer.value.removeprefix("kvlease-"),
        health_pb2.HealthCheckRequest(service=SERVICES[peer]),
    )
    stub = cast(Any, health_pb2_grpc).HealthStub(await ways.channel(peer, address))
    try:
        answer = await stub.Check(request, timeout=ways.timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            return Health(process, address, Exit.PROBLEM, f"answers, but is no {process}")
        return Health(process, address, Exit.UNREACHABLE, f"no answer ({error.code().name})")
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Health(process, address, Exit.OK if serving else Exit.PROBLEM, status.lower())


async def _ask_router(ways: Fleet, url: str, *, live: bool) -> Health:
    context = ways.tls.client_context() if ways.tls is not None else True
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ways.timeout_s)) as session,
            session.get(url + "/health", ssl=context) as response,
        ):
            status, raw = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Health("router", url, Exit.UNREACHABLE, f"no answer ({type(error).__name__})")
    said = _said_by_router(raw)
    if said is None:
        return Health("router", url, Exit.PROBLEM, "answers, but is no router")
    return Health("router", url, Exit.OK if status == 200 or live else Exit.PROBLEM, said)


def _said_by_router(raw: bytes) -> str | None:
    """The status that a router tells; None of an answer that is no router's, as engines answer, too."""
    try:
        body: Any = json.loads(raw)
    except ValueError:
        return None
    said = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    return str(said.get("status")) if said.get("service") == Identity.ROUTER.value else None
