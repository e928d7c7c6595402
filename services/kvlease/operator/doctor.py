"""`kvlease doctor`: looks at a fleet from here, and says what is wrong, what could be better, and what to do."""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from contextlib import suppress

import aiohttp

from kvlease.core.errors import InvalidArgument, StoreUnavailable
from kvlease.core.records import Engine, HolderGauges
from kvlease.operator.command import Exit, OperatorError, Output, Row, perform, show
from kvlease.operator.connection import Fleet, fleet
from kvlease.operator.engines import read_all
from kvlease.operator.findings import (
    EngineFindings,
    EtcdFindings,
    Finding,
    Verdict,
    judge_etcd,
    judge_fleet,
    judge_store,
)
from kvlease.operator.flags import add_common_flags, add_registry_flag
from kvlease.store.etcd_client import VERSION_MIN, EtcdClient, EtcdOptions, parse_endpoints

COLUMNS = ("verdict", "check", "subject", "text")
ORDER = (Verdict.PROBLEM, Verdict.ADVICE, Verdict.OK)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease doctor`."""
    parser.add_argument(
        "--etcd", default="", metavar="HOST:PORT,...", help="members of etcd to look at as well"
    )
    for flag, meaning in (
        ("--etcd-ca-file", "certificates that etcd's are checked against (default: no TLS)"),
        ("--etcd-certificate-file", "own certificate for etcd, where it asks for one"),
        ("--etcd-key-file", "key of that certificate"),
        ("--etcd-user", "user of etcd"),
        ("--etcd-password-file", "file with that user's password"),
    ):
        parser.add_argument(flag, default="", metavar="VALUE", help=meaning)
    add_registry_flag(parser)
    add_common_flags(parser)
    parser.epilog = (
        "It connects to side channels and APIs of engines from this machine: run it where engines can be reached. "
        "Exit status: 0 no problem, 1 a problem, 2 usage, 3 the registry does not answer."
    )


def run(arguments: Namespace) -> int:
    """Looks. The exit status: 1 when there is a problem; advice alone is no problem."""
    return perform("doctor", _examine, arguments)


async def _examine(arguments: Namespace) -> int:
    # etcd first: where it is away, registries have no list of engines to give.
    findings = [
        finding for member in await _look_at_etcd(arguments) for finding in judge_etcd(member, VERSION_MIN)
    ]
    async with fleet(arguments) as ways:
        try:
            findings += judge_fleet(await _look_at_engines(ways, arguments.registry))
        except StoreUnavailable as error:
            findings.append(judge_store(arguments.registry, str(error)))
    findings.sort(key=lambda finding: ORDER.index(finding.verdict))
    show(_rows(findings), COLUMNS, arguments.output)
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    if arguments.output is Output.TABLE:
        print(f"\n{problems} problem{'' if problems == 1 else 's'}, {len(findings)} things looked at")
    return Exit.PROBLEM if problems else Exit.OK


def _rows(findings: Iterable[Finding]) -> list[Row]:
    return [
        {
            "verdict": finding.verdict.value,
            "check": finding.check,
            "subject": finding.subject,
            "text": finding.text,
        }
        for finding in findings
    ]


async def _look_at_engines(ways: Fleet, address: str) -> list[EngineFindings]:
    """What can be asked about the engines that a registry lists.

    Raises:
        StoreUnavailable: the registry answers, its store does not.
    """
    registry = await ways.registry(address)
    engines = await registry.list_engines()
    gauges = await read_all(ways, engines)
    looks = (_look_at(ways, engine, told) for engine, told in zip(engines, gauges, strict=True))
    return list(await asyncio.gather(*looks))


async def _look_at(ways: Fleet, engine: Engine, gauges: HolderGauges | None) -> EngineFindings:
    api, side_channel = await asyncio.gather(_reaches_api(ways, engine), _reaches_side_channel(ways, engine))
    return EngineFindings(engine, gauges, api, side_channel)


async def _reaches_api(ways: Fleet, engine: Engine) -> bool:
    context = ways.tls.client_context() if ways.tls is not None else True
    with suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ways.timeout_s)) as session,
            session.get(engine.url + "/health", ssl=context) as response,
        ):
            return response.status == 200
    return False


async def _reaches_side_channel(ways: Fleet, engine: Engine) -> bool | None:
    location = engine.location
    if location is None:
        return None
    host, port = location.side_channel_host, location.side_channel_port
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ways.timeout_s):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True
    return False


async def _look_at_etcd(arguments: Namespace) -> list[EtcdFindings]:
    if not arguments.etcd:
        return []
    try:
        endpoints = parse_endpoints(arguments.etcd)
    except InvalidArgument as error:
        raise OperatorError(f"--etcd: {error}", Exit.USAGE) from error
    options = EtcdOptions(
        endpoints,
        arguments.timeout_s,
        ca_file=arguments.etcd_ca_file,
        certificate_file=arguments.etcd_certificate_file,
        key_file=arguments.etcd_key_file,
        user=arguments.etcd_user,
        password_file=arguments.etcd_password_file,
        accept_old=True,
    )
    client = EtcdClient(options)
    try:
        return list(await asyncio.gather(*(_look_at_member(client, endpoint) for endpoint in endpoints)))
    finally:
        await client.close()


async def _look_at_member(client: EtcdClient, endpoint: str) -> EtcdFindings:
    try:
        status = await client.status(endpoint)
    except StoreUnavailable as error:
        return EtcdFindings(endpoint, failure=str(error))
    return EtcdFindings(
        endpoint, status.version, status.db_size_in_use, status.db_size_quota, tuple(status.errors)
    )
