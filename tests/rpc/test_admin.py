"""The admin address: who may read the metrics of a process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvlease.core.errors import InvalidArgument
from kvlease.runtime.admin import AdminServer, AdminSettings
from kvlease.runtime.metrics import Metrics
from kvlease.runtime.tls import Tls
from stubs.certificates import Authority


@asynccontextmanager
async def serving(settings: AdminSettings, tls: Tls | None = None) -> AsyncIterator[AdminServer]:
    server = AdminServer(settings, Metrics("registry"), tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def status(url: str, headers: Mapping[str, str] | None = None) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as answer:
        return answer.status


async def test_the_token_of_the_file_opens_the_metrics_also_after_it_was_replaced(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    async with serving(AdminSettings("127.0.0.1:0", str(token))) as server:
        assert await status(server.url) == 401
        assert await status(server.url, {"Authorization": "Bearer open"}) == 401
        assert await status(server.url, {"Authorization": "Basic sesame"}) == 401
        assert await status(server.url, {"Authorization": "Bearer sesame"}) == 200
        token.write_text("another")
        assert await status(server.url, {"Authorization": "Bearer sesame"}) == 401
        assert await status(server.url, {"authorization": "bearer another"}) == 200
        token.unlink()
        assert await status(server.url, {"Authorization": "Bearer "}) == 401


async def test_without_a_token_file_loopback_reads_freely() -> None:
    async with serving(AdminSettings("127.0.0.1:0")) as server:
        assert await status(server.url) == 200


@pytest.mark.parametrize("content", [None, "", " \n"])
async def test_a_token_that_is_not_there_keeps_the_process_from_starting(
    tmp_path: Path, content: str | None
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    with pytest.raises(InvalidArgument, match="admin_token_file"):
        await AdminServer(AdminSettings("127.0.0.1:0", str(token)), Metrics("registry")).start()


async def test_over_tls_only_a_certificate_of_the_authority_reads_them(tmp_path: Path) -> None:
    authority = Authority()
    tls = Tls(str(authority.issue(tmp_path / "own", "kvlease-registry")))
    stranger = Tls(str(Authority().issue(tmp_path / "stranger")))
    async with serving(AdminSettings("127.0.0.1:0"), tls) as server, aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/metrics", ssl=tls.client_context()) as answer:
            assert answer.status == 200
        for context in (stranger.client_context(), False):
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{server.url}/metrics", ssl=context)
