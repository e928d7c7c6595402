"""Headers that cross the router, and those that end there."""

import pytest

from kvlease.router.headers import answer_headers, bearer_token, engine_headers, request_id_from


def test_hop_by_hop_headers_end_at_the_router_in_any_case_and_by_name() -> None:
    client = [
        ("Authorization", "Bearer x"),
        ("connection", "keep-alive, X-Named"),
        ("X-NAMED", "1"),
        ("TRANSFER-encoding", "chunked"),
        ("Host", "router"),
        ("Content-Length", "7"),
        ("x-data-parallel-rank", "3"),
        ("anthropic-version", "1"),
        ("traceparent", "00-1-1-01"),
    ]
    assert engine_headers(client, "id") == {
        "Authorization": "Bearer x",
        "anthropic-version": "1",
        "traceparent": "00-1-1-01",
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "X-Request-Id": "id",
    }


def test_an_answer_keeps_what_is_meant_for_the_client() -> None:
    engine = {
        "Retry-After": "3",
        "content-type": "text/x",
        "Content-Length": "1",
        "Date": "x",
        "Server": "uvicorn",
    }
    assert answer_headers(engine) == {"Retry-After": "3", "content-type": "text/x"}


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("mine-1", "mine-1"),
        (None, "minted"),
        ("", "minted"),
        ("a b", "minted"),
        ("x" * 129, "minted"),
        ("ü", "minted"),
    ],
)
def test_a_request_id_is_the_clients_when_it_is_one(given: str | None, used: str) -> None:
    assert request_id_from(given, "minted") == used


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (None, "anonymous"),
        ("", "anonymous"),
        ("Bearer  key ", "key"),
        ("bearer key", "key"),
        ("Basic abc", "Basic abc"),
    ],
)
def test_the_bearer_token_stands_for_the_caller(header: str | None, token: str) -> None:
    assert bearer_token(header) == token
