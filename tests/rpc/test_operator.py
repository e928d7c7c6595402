"""The operator's commands against a real registry, router and sidecars whose connectors hold real tables."""

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlease.cli import parser_of
from kvlease.core.holding import Hold
from kvlease.core.ids import lease_id_to_hex
from kvlease.core.lease import LeaseEvent
from kvlease.core.records import EngineRole, KvLocation
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.operator import leases
from kvlease.v1 import registry_pb2
from kvlease.wire.values import duration_to_wire

from .conftest import TENANT, Fleet, Pair, Run, address, facts, make_ask, make_grant, until

DEADLINE_S = 30.0


async def confirm(fleet: Fleet, *lease_ids: int) -> None:
    """A router's heartbeat confirms leases, so that they are recorded."""
    stub = await fleet.registry()
    session: Any = stub.RenewLeases()
    renewals = registry_pb2.EngineRenewals(engine_id="decode-1", added_lease_ids=lease_ids)
    await session.write(
        registry_pb2.RenewLeasesRequest(
            session="router-1",
            epoch=1,
            sequence=1,
            full=True,
            engines=[renewals],
            duration=duration_to_wire(20.0),
            reservation=duration_to_wire(30.0),
        )
    )
    await session.read()
    await session.done_writing()

    async def recorded() -> bool:
        return len(await fleet.store.list_leases()) == len(lease_ids)

    await until(recorded)


# --- engines --------------------------------------------------------------------------------------------------


async def test_engines_are_listed_with_the_blocks_that_their_holders_count(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    pair.decode.grant(make_grant(1))
    said = await run("engines", "--registry", address(fleet), "--output", "json")
    rows = {row["engine_id"]: row for row in said.json}
    assert said.status == 0
    assert {row["role"] for row in rows.values()} == {"prefill", "decode"}
    assert (rows["decode-1"]["held_blocks"], rows["prefill-1"]["held_blocks"]) == (2, 0)
    assert {row["state"] for row in rows.values()} == {"ready"}


async def test_an_engine_whose_sidecar_is_silent_is_a_problem(fleet: Fleet, pair: Pair, run: Run) -> None:
    server = fleet.sidecars[1]
    await server._servers[0].stop(0.0)
    said = await run("engines", "--registry", address(fleet), "--output", "json", "--timeout-s", "15")
    states = {row["engine_id"]: row["state"] for row in said.json}
    assert (said.status, states) == (1, {"prefill-1": "ready", "decode-1": "silent"})


async def test_a_command_without_a_registry_says_so_in_one_line(run: Run) -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    for name, *arguments in (["engines"], ["leases", "list"], ["top"], ["drain", "e"], ["doctor"]):
        said = await run(name, *arguments, "--registry", where, "--timeout-s", "2")
        assert said.status == 3, name
        assert said.err.count("\n") == 1
        assert f"the registry at {where} does not answer" in said.err


# --- leases ---------------------------------------------------------------------------------------------------


async def test_leases_are_listed_by_engine_and_tenant_and_got_by_id(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    pair.decode.grant(make_grant(1))
    await confirm(fleet, 1)
    registry = ("--registry", address(fleet), "--output", "json")
    said = await run("leases", "list", "--tenant", TENANT, *registry)
    assert [row["lease_id"] for row in said.json] == [lease_id_to_hex(1)]
    assert (await run("leases", "list", "--engine", "prefill-1", *registry)).json == []
    got = await run("leases", "get", lease_id_to_hex(1), *registry)
    assert (got.status, got.json) == (0, said.json)


async def test_a_lease_that_is_not_recorded_is_a_problem(fleet: Fleet, pair: Pair, run: Run) -> None:
    said = await run("leases", "get", lease_id_to_hex(7), "--registry", address(fleet))
    assert said.status == 1
    assert lease_id_to_hex(7) in said.err


@pytest.mark.parametrize("verb", [("list",), ("release", lease_id_to_hex(1))])
async def test_leases_of_an_engine_that_is_not_registered_are_a_problem_that_names_it(
    fleet: Fleet, pair: Pair, run: Run, verb: tuple[str, ...]
) -> None:
    pair.decode.grant(make_grant(1))
    await confirm(fleet, 1)
    where = ("--registry", address(fleet), "--output", "json")
    said = await run("leases", *verb, "--engine", "nope", *where)
    assert (said.status, said.out) == (1, "")
    error = json.loads(said.err)["error"]
    assert (error["reason"], error["message"]) == ("not_found", "engine nope is not registered")
    assert pair.decode.table.get(1) is not None


@pytest.mark.parametrize("text", ["7", "0000000000000000", "not-hex-at-all-!"])
async def test_what_is_no_lease_id_is_a_wrong_use(run: Run, text: str) -> None:
    with pytest.raises(SystemExit) as refused:
        await run("leases", "get", text)
    assert refused.value.code == 2


async def test_a_release_ends_the_lease_at_its_holder_and_a_second_one_finds_it_ended(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    pair.decode.grant(make_grant(1))
    await confirm(fleet, 1)
    arguments = ("leases", "release", lease_id_to_hex(1), "--registry", address(fleet), "--output", "json")
    said = await run(*arguments)
    assert (said.status, said.json[0]["result"]) == (0, "released")
    assert pair.decode.table.get(1) is None
    again = await run(*arguments, "--engine", "decode-1")
    assert (again.status, again.json[0]["result"]) == (0, "released")
    unknown = await run("leases", "release", lease_id_to_hex(9), "--registry", address(fleet))
    assert unknown.status == 1


async def test_a_watch_tells_what_is_recorded_and_what_is_gone(
    fleet: Fleet, pair: Pair, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.decode.grant(make_grant(1))
    await confirm(fleet, 1)
    flags = ("--count", "2", "--registry", address(fleet), "--output", "json")
    arguments = parser_of("leases").parse_args(["watch", *flags])
    watch: asyncio.Task[int] = asyncio.create_task(leases.run(arguments))  # type: ignore[arg-type]
    printed: list[str] = []

    async def told(count: int) -> bool:
        printed.extend(capsys.readouterr().out.splitlines())
        return len(printed) == count

    await until(lambda: told(1))
    pair.decode.end(1, LeaseEvent.RELEASE)
    await until(lambda: told(2))
    async with asyncio.timeout(DEADLINE_S):
        assert await watch == 0
    assert [json.loads(line)["change"] for line in printed] == ["there", "gone"]


# --- drain, top -----------------------------------------------------------------------------------------------


async def test_a_drained_engine_is_registered_so_until_it_is_undone(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    flags = ("--registry", address(fleet), "--output", "json")
    said = await run("drain", "decode-1", "--wait-s", "30", *flags)
    assert (said.status, said.json[0]["running_requests"]) == (0, 0)

    async def draining() -> bool:
        engine = await fleet.store.get_engine("decode-1")
        return engine is not None and engine.draining

    await until(draining)
    assert {row["state"] for row in (await run("engines", *flags)).json} == {"ready", "draining"}
    assert (await run("drain", "decode-1", "--undo", *flags)).status == 0

    async def taking_turns() -> bool:
        return not await draining()

    await until(taking_turns)


async def test_a_drain_of_the_last_engine_of_a_role_warns_and_the_doctor_finds_it(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    await fleet.connector(await fleet.sidecar(EngineRole.PREFILL), facts("prefill-2"))
    flags = ("--registry", address(fleet), "--output", "json")
    assert (await run("drain", "prefill-1", *flags)).err == ""
    said = await run("drain", "decode-1", *flags)
    warning = json.loads(said.err)["warning"]
    assert (said.status, warning["reason"]) == (0, "last_of_its_role")
    assert "decode-1 was the last decode engine of tiny" in warning["message"]

    async def found() -> bool:
        _, seen = await findings(run, fleet, "--timeout-s", "15")
        problem = seen.get(("roles", "tiny"))
        return problem is not None and problem["verdict"] == "problem"

    await until(found)
    plain = await run("drain", "prefill-2", "--registry", address(fleet))
    assert plain.status == 0
    assert plain.err.startswith("kvlease drain: warning: prefill-2 was the last prefill engine of tiny")
    assert (await run("drain", "decode-1", "--undo", *flags)).err == ""


async def test_a_drain_that_waits_for_a_read_longer_than_told_is_a_problem(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    pair.decode.grant(make_grant(1))
    ask = make_ask(1)
    pinned = pair.decode.table.pin(fleet.clock.now_s(), replace(ask, holder=pair.decode.facts.holder))
    assert isinstance(pinned, Hold)
    said = await run("drain", "decode-1", "--wait-s", "0.1", "--registry", address(fleet))
    assert said.status == 1
    assert "2 of its blocks are being read" in said.err


async def test_an_engine_that_is_not_registered_cannot_be_drained(fleet: Fleet, run: Run) -> None:
    said = await run("drain", "nobody", "--registry", address(fleet))
    assert said.status == 1
    assert "nobody" in said.err


async def test_top_counts_leases_and_tells_rates_from_the_second_look_on(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    pair.decode.grant(make_grant(1))
    await confirm(fleet, 1)
    said = await run(
        "top", "--count", "2", "--interval-s", "0.05", "--registry", address(fleet), "--output", "json"
    )
    looks = [json.loads(line) for line in said.out.splitlines()]
    first, second = ({row["engine_id"]: row for row in look["engines"]}["decode-1"] for look in looks)
    assert (said.status, first["leases"], first["read_mib_per_s"]) == (0, 1, None)
    assert second["read_mib_per_s"] == 0.0
    assert second["held_percent"] == pytest.approx(100 * 2 / 90)


async def test_top_for_a_person_has_a_line_per_engine_and_no_escapes_in_a_file(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    said = await run("top", "--count", "1", "--registry", address(fleet))
    assert "1 decode, 1 prefill; 0 leases" in said.out
    assert "\x1b" not in said.out
    assert sum("decode-1" in line for line in said.out.splitlines()) == 1


# --- doctor ---------------------------------------------------------------------------------------------------


async def findings(run: Run, fleet: Fleet, *flags: str) -> tuple[int, dict[tuple[str, str], Any]]:
    said = await run("doctor", "--registry", address(fleet), "--output", "json", *flags)
    return said.status, {(row["check"], row["subject"]): row for row in said.json}


async def test_the_doctor_finds_the_side_channel_and_the_api_that_do_not_answer(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    status, found = await findings(run, fleet, "--timeout-s", "15")
    assert status == 1
    assert found["side_channel", "decode decode-1"]["verdict"] == "problem"
    assert found["api", "decode decode-1"]["verdict"] == "problem"
    assert found["layout", "decode decode-1"]["verdict"] == "ok"
    assert found["connector", "decode decode-1"]["verdict"] == "ok"
    assert found["versions", "fleet"]["verdict"] == "ok"


async def test_the_doctor_connects_to_side_channels(fleet: Fleet, run: Run) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        location = KvLocation("127.0.0.1", port)
        await fleet.connector(await fleet.sidecar(), facts("decode-1", location=location))
        _, found = await findings(run, fleet, "--timeout-s", "15")
    assert found["side_channel", "decode decode-1"]["verdict"] == "ok"
    assert found["roles", "fleet"]["text"].startswith("no prefill engine")


async def test_the_doctor_reads_version_and_room_of_a_real_etcd(
    fleet: Fleet, pair: Pair, run: Run, tmp_path: Path
) -> None:
    etcd = EmbeddedEtcd()
    await etcd.start()
    try:
        nobody = f"127.0.0.1:{free_ports(1)[0]}"
        _, found = await findings(run, fleet, "--etcd", f"{etcd.endpoint},{nobody}", "--timeout-s", "15")
    finally:
        await etcd.stop()
    assert found["etcd_quota", f"etcd {etcd.endpoint}"]["verdict"] == "ok"
    assert found["etcd_version", f"etcd {etcd.endpoint}"]["verdict"] in ("ok", "advice")
    assert found["etcd", f"etcd {nobody}"]["verdict"] == "problem"


async def test_the_doctor_tells_a_registry_whose_store_is_away_and_what_it_sees_of_etcd(
    fleet: Fleet, pair: Pair, run: Run
) -> None:
    fleet.store.broken = True
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    status, found = await findings(run, fleet, "--etcd", nobody)
    assert status == 1
    assert set(found) == {("store", f"registry {address(fleet)}"), ("etcd", f"etcd {nobody}")}
    told = found["store", f"registry {address(fleet)}"]
    assert told["verdict"] == "problem"
    assert told["text"].startswith("the registry answers, its store does not (broken by the test)")


# --- as a process ---------------------------------------------------------------------------------------------


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvlease.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_exit_status_of_the_process_is_the_commands_and_no_traceback_is_seen() -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    process = await started("engines", "--registry", where, "--timeout-s", "2")
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert (process.returncode, out) == (3, b"")
    assert err.decode() == f"kvlease engines: the registry at {where} does not answer\n"


async def test_top_ends_on_an_interrupt_without_a_traceback(fleet: Fleet, pair: Pair) -> None:
    # A shell starts what runs in its background with interrupts ignored. Children inherit that, and no handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = await started("top", "--registry", address(fleet), "--output", "json", "--interval-s", "60")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    async with asyncio.timeout(60):
        first = await process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert {row["engine_id"] for row in json.loads(first)["engines"]} == {"prefill-1", "decode-1"}
    assert (process.returncode, err) == (130, b"")
