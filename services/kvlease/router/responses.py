"""The responses that a router keeps, so that a later request may name one instead of sending its history.

They live in the router's memory, each with what its own turn added and the id of the one before. Another router does
not know them: a request that names one there gets an error of its API, and the client sends its history.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvlease.router.dialect import encode, encode_answer, objects


class UnknownResponse(Exception):
    """A request names a response that is not known here, of this tenant.

    Attributes:
        response_id: the id that was named.
    """

    def __init__(self, response_id: str) -> None:
        super().__init__(f"response {response_id!r} is not known here")
        self.response_id = response_id


@dataclass(frozen=True, slots=True)
class _Stored:
    """One response, in JSON so that it has a size."""

    previous_id: str
    items: bytes
    response: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.response)


class ResponseStore:
    """Responses by tenant and id.

    Args:
        responses_max: responses kept; beyond, the least recently named is forgotten.
        bytes_max: JSON kept, likewise.
    """

    def __init__(self, responses_max: int, bytes_max: int) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._stored: OrderedDict[tuple[str, str], _Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self,
        tenant: str,
        response_id: str,
        previous_id: str,
        items: Sequence[Mapping[str, Any]],
        response: Mapping[str, Any],
    ) -> None:
        """Keeps a response and the items of its own request."""
        self.delete(tenant, response_id)
        stored = _Stored(previous_id, encode({"items": list(items)}), encode_answer(response))
        self._stored[tenant, response_id] = stored
        self._bytes += stored.size_bytes
        while self._stored and (len(self._stored) > self._responses_max or self._bytes > self._bytes_max):
            _, forgotten = self._stored.popitem(last=False)
            self._bytes -= forgotten.size_bytes

    def history(self, tenant: str, response_id: str) -> list[dict[str, Any]] | None:
        """The items up to a response, its own output among them; None when a link of them is not known.

        Nor is it where an engine gave a response the id of one that it follows.
        """
        links: list[_Stored] = []
        while response_id:
            stored = self._stored.get((tenant, response_id))
            if stored is None or len(links) == len(self._stored):
                return None
            self._stored.move_to_end((tenant, response_id))
            links.append(stored)
            response_id = stored.previous_id
        items: list[dict[str, Any]] = []
        for stored in reversed(links):
            items.extend(_loaded(stored.items)["items"])
            items.extend(objects(_loaded(stored.response).get("output")))
        return items

    def response(self, tenant: str, response_id: str) -> bytes | None:
        """A response as its client got it, in JSON."""
        stored = self._stored.get((tenant, response_id))
        return None if stored is None else stored.response

    def items(self, tenant: str, response_id: str) -> list[dict[str, Any]] | None:
        """The items that a response answered, the history before it among them."""
        stored = self._stored.get((tenant, response_id))
        if stored is None:
            return None
        before = self.history(tenant, stored.previous_id) if stored.previous_id else []
        return None if before is None else [*before, *_loaded(stored.items)["items"]]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response. Those that follow it lose their history."""
        stored = self._stored.pop((tenant, response_id), None)
        if stored is None:
            return False
        self._bytes -= stored.size_bytes
        return True

    def forget_tenant(self, tenant: str) -> int:
        """Forgets what a tenant said. Returns how many responses that were."""
        named = [response_id for owner, response_id in self._stored if owner == tenant]
        for response_id in named:
            self.delete(tenant, response_id)
        return len(named)


def _loaded(data: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(data))
