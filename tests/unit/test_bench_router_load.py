"""The client of `kvlease bench router`."""

from aiohttp import web
from aiohttp.test_utils import TestServer

from kvlease.bench.router_load import drive


async def answered(_: web.Request) -> web.Response:
    return web.json_response({})


async def test_a_load_of_no_time_at_all_is_a_request_on_each_connection() -> None:
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answered)])
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        load = await drive([url], lambda _: b"{}", concurrency=3, duration_s=0.0)
        few = await drive([url], lambda _: b"{}", concurrency=3, duration_s=0.0, count_max=2)
    assert (len(load.answer_s), load.failed) == (3, 0)
    assert len(few.answer_s) == 2
