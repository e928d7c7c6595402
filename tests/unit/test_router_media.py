"""Names that clients give to media are each tenant's own, since engines keep media by name for everybody."""

import json
from typing import Any

import pytest

from kvlease.router.bodies import Api, Reading, make_neutral, parse_turn

URL = {"url": "https://example.org/logo.png"}


def named(name: object, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": URL, "uuid": name, **more}


def neutral(tenant: str, body: dict[str, Any], *, isolate: bool = True) -> Any:
    body = json.loads(json.dumps(body))
    make_neutral(body, tenant, isolate=isolate)
    return body


def name_in(tenant: str, name: object, *, isolate: bool = True) -> Any:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, named(name)]}]}
    return neutral(tenant, body, isolate=isolate)["messages"][0]["content"][1]["uuid"]


def test_two_tenants_never_mean_one_image_by_one_name() -> None:
    assert name_in("acme", "logo") != name_in("other", "logo")
    assert name_in("acme", "logo") == name_in("acme", "logo") != name_in("acme", "logo2")
    assert "logo" not in name_in("acme", "logo")


def test_a_name_that_is_no_string_is_what_vllm_makes_of_it() -> None:
    assert name_in("acme", 5) == name_in("acme", "5") != name_in("acme", "")
    assert name_in("acme", "") != name_in("other", "")


def test_an_image_without_a_name_gets_none() -> None:
    assert name_in("acme", None) is None
    part = {"type": "image_url", "image_url": URL}
    body = {"messages": [{"role": "user", "content": [part]}, {"role": "user", "content": "and?"}]}
    assert neutral("acme", body)["messages"] == body["messages"]


def test_without_isolation_names_are_left_as_they_are() -> None:
    assert name_in("acme", "logo", isolate=False) == "logo"


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "user", "content": [named("logo")]}]},
        {"query": {"content": [named("logo")]}},
        {"documents": {"content": [named("logo")]}},
        {"data_1": [{"content": [named("logo")]}, "text"]},
    ],
)
def test_media_of_other_paths_are_kept_apart_too(body: dict[str, Any]) -> None:
    one, other = (json.dumps(neutral(tenant, body)) for tenant in ("acme", "other"))
    assert '"logo"' not in one + other
    assert one != other


def test_what_is_named_so_elsewhere_is_the_clients_own() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi", "uuid": "mine"}, "odd", {"content": ["odd", 7, None]}],
        "metadata": {"uuid": "mine"},
        "tools": [{"function": {"parameters": {"properties": {"uuid": {"type": "string"}}}}}],
    }
    kept = neutral("acme", body)
    assert {name: kept[name] for name in body} == body


def test_a_turn_is_told_by_names_that_stay_the_same_from_turn_to_turn() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [named("logo")]}]}
    raw = json.dumps(body).encode()
    first, again = (parse_turn(Api.CHAT, raw, "acme", reading=Reading()) for _ in range(2))
    assert first.body == again.body
    assert first.transcript == again.transcript
