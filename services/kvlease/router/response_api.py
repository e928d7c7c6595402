"""The responses that the router keeps, read and deleted by id."""

from collections.abc import Callable

from aiohttp import web

from kvlease.router.answers import BASES, Refused, json_answer
from kvlease.router.responses import ResponseStore, UnknownResponse
from kvlease.router.turn import JSON_HEADERS


class ResponseApi:
    """The handlers under `/v1/responses/{response_id}`.

    Args:
        tenant_of: whom a request belongs to.
    """

    def __init__(self, store: ResponseStore, tenant_of: Callable[[web.Request], str]) -> None:
        self._store = store
        self._tenant_of = tenant_of

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        routes: list[web.RouteDef] = []
        for base in BASES:
            response = base + "/responses/{response_id}"
            routes += [
                web.get(response, self._read),
                web.delete(response, self._delete),
                web.get(response + "/input_items", self._items),
                web.post(response + "/cancel", self._cancel),
            ]
        return routes

    async def _read(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        response = self._store.response(self._tenant_of(request), response_id)
        if response is None:
            raise UnknownResponse(response_id)
        return web.Response(headers=JSON_HEADERS, body=response)

    async def _items(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        items = self._store.items(self._tenant_of(request), response_id)
        if items is None:
            raise UnknownResponse(response_id)
        return json_answer({"object": "list", "data": items, "has_more": False})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        response_id = request.match_info["response_id"]
        if not self._store.delete(self._tenant_of(request), response_id):
            raise UnknownResponse(response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        self._tenant_of(request)
        raise Refused(400, "no response runs in the background here", "not_in_background")
