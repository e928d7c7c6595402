"""What a sidecar and a registry tell when they are scraped, over a real connector's table and a store that breaks."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvlease.core.lease import LeaseEvent
from kvlease.testing.connector import FakeConnector
from kvlease.v1 import registry_pb2, sidecar_pb2

from .conftest import Fleet, make_grant, until


async def scraped(url: str, series: str, **labels: str) -> float:
    """The sum of a series' values whose labels have these values."""
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        assert response.status == 200
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == series and labels.items() <= sample.labels.items()
    )


async def attached(fleet: Fleet, holder_call_s: float = 3.0) -> tuple[FakeConnector, str]:
    """A connector, and where its sidecar's metrics are."""
    sidecar = await fleet.sidecar(holder_call_s=holder_call_s)
    return await fleet.connector(sidecar), sidecar.admin_url


async def test_a_sidecar_tells_blocks_and_leases_of_each_engine(fleet: Fleet) -> None:
    connector, url = await attached(fleet)
    connector.grant(make_grant(1))

    async def offered() -> bool:
        return await scraped(url, "kvlease_engine_leases", kind="conversation", state="provisional") == 1

    await until(offered)
    assert await scraped(url, "kvlease_engine_up", engine_id="decode-1") == 1
    assert await scraped(url, "kvlease_engine_blocks", state="held") == 2
    assert await scraped(url, "kvlease_engine_info", role="decode", vllm_version="0.32.0", retain="yes") == 1


async def test_leases_are_counted_as_they_end_and_as_lost_with_their_engine(fleet: Fleet) -> None:
    connector, url = await attached(fleet)
    for lease_id in (1, 2):
        connector.grant(make_grant(lease_id, conversation=bytes([lease_id])))
    connector.end(1, LeaseEvent.EVICT)

    async def evicted() -> bool:
        return await scraped(url, "kvlease_lease_endings_total", kind="conversation", state="evicted") == 1

    await until(evicted)
    await connector.detach()

    async def lost() -> bool:
        return await scraped(url, "kvlease_lease_endings_total", kind="conversation", state="lost") == 1

    await until(lost)
    assert await scraped(url, "kvlease_engine_up") == 0
    assert await scraped(url, "kvlease_engine_info") == 0


async def test_an_engine_whose_connector_is_silent_is_told_as_down_with_the_rest_of_the_scrape(
    fleet: Fleet,
) -> None:
    connector, url = await attached(fleet, holder_call_s=0.5)
    connector.silent = True
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    assert [sample.value for sample in families["kvlease_engine_up"].samples] == [0.0]
    assert "kvlease_engine_blocks" not in families
    assert await scraped(url, "kvlease_scrape_failures_total") == 0


async def test_calls_are_timed_at_the_server_and_by_whoever_makes_them(fleet: Fleet) -> None:
    connector, url = await attached(fleet)
    connector.grant(make_grant(1))
    stub = await fleet.peer(fleet.sidecars[0])
    await stub.ReadGauges(sidecar_pb2.ReadGaugesRequest(engine_id="decode-1"), timeout=10)
    method = "kvlease.v1.SidecarService/ReadGauges"
    assert await scraped(url, "kvlease_rpc_server_seconds_count", method=method, status="OK") == 1
    assert await scraped(url, "kvlease_connector_call_seconds_count", call="read_gauges", outcome="ok") >= 1
    assert await scraped(url, "kvlease_store_call_seconds_count", call="open_session", outcome="ok") == 1


async def test_a_store_that_does_not_answer_shows_in_the_registrys_metrics(fleet: Fleet) -> None:
    await attached(fleet)
    server = fleet.registry_server
    assert server is not None

    async def known() -> bool:
        return await scraped(server.admin_url, "kvlease_engines", role="decode", state="ready") == 1

    await until(known)
    stub = await fleet.registry()
    fleet.store.broken = True
    call = stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=10)
    assert (await call.code()).name == "UNAVAILABLE"
    fleet.store.broken = False
    assert (
        await scraped(
            server.admin_url,
            "kvlease_store_call_seconds_count",
            call="list_engines",
            outcome="StoreUnavailable",
        )
        == 1
    )
    method = "kvlease.v1.RegistryService/ListEngines"
    assert (
        await scraped(
            server.admin_url, "kvlease_rpc_server_seconds_count", method=method, status="UNAVAILABLE"
        )
        == 1
    )
