"""Which HTTP headers cross the router, and in which direction."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
OURS_TOWARDS_ENGINES = frozenset(
    {
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "accept-encoding",
        "expect",
        "x-request-id",
        "x-data-parallel-rank",
    }
)
OURS_TOWARDS_CLIENTS = frozenset(
    {"content-length", "content-encoding", "date", "server", "x-request-id", "x-conversation-id"}
)
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class EngineCredentials:
    """What stands for the caller towards engines.

    Attributes:
        hidden: headers in lower case that end at the router: what it has checked is no engine's business.
        key: the engines' own key, empty without one.
    """

    hidden: frozenset[str] = frozenset()
    key: str = ""


CREDENTIAL_HEADERS = frozenset({"authorization", "x-api-key"})
CLIENTS_CREDENTIALS = EngineCredentials()


def engine_headers(
    client: Iterable[tuple[str, str]], request_id: str, credentials: EngineCredentials = CLIENTS_CREDENTIALS
) -> dict[str, str]:
    """The headers of a leg: the client's, without what ends at the router."""
    ours = OURS_TOWARDS_ENGINES | credentials.hidden if credentials.hidden else OURS_TOWARDS_ENGINES
    kept = _end_to_end(client, ours)
    if credentials.key:
        kept["Authorization"] = f"Bearer {credentials.key}"
    kept["Content-Type"] = "application/json"
    kept["Accept-Encoding"] = "identity"
    kept["X-Request-Id"] = request_id
    return kept


def answer_headers(engine: Mapping[str, str]) -> dict[str, str]:
    """The headers of an engine's answer, `Retry-After` among them, without what ends at the router."""
    return _end_to_end(engine.items(), OURS_TOWARDS_CLIENTS)


def request_id_from(client: str | None, minted: str) -> str:
    """The client's request id when it is one, else the minted one."""
    return client if client and REQUEST_ID.fullmatch(client) else minted


def bearer_token(authorization: str | None) -> str:
    """What stands for the caller: the token of a bearer, else the whole header; `anonymous` without one."""
    if not authorization:
        return "anonymous"
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else authorization


def _end_to_end(headers: Iterable[tuple[str, str]], ours: frozenset[str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    named: list[str] = []
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            named += (one.strip().lower() for one in value.split(","))
        elif lower not in HOP_BY_HOP and lower not in ours:
            kept[name] = value
    return {name: value for name, value in kept.items() if name.lower() not in named} if named else kept
