"""Fields that are the router's: what a client may write against what any parser finds in what an engine gets."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.errors import InvalidArgument
from kvlease.router.bodies import parse_object
from kvlease.router.dialect import encode
from kvlease.router.reserved import CONTENT_FIELDS, RESERVED_FIELDS, strip_reserved

NAMES = st.sampled_from(
    [*RESERVED_FIELDS, "model", "messages", "extra_body", "stop", "a_b", "ключ", "\U0001f600"]
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), NAMES, st.text(max_size=5))


def spelt(name: str) -> st.SearchStrategy[str]:
    """The ways to write a key in JSON: each letter as it is, or escaped."""
    ways = [st.sampled_from([letter, "".join(_escapes(letter))]) for letter in name]
    return st.tuples(*ways).map(lambda parts: f'"{"".join(parts)}"')


def _escapes(letter: str) -> list[str]:
    code = ord(letter)
    if code < 0x10000:
        return [f"\\u{code:04X}"]
    code -= 0x10000
    return [f"\\u{0xD800 + (code >> 10):04x}", f"\\u{0xDC00 + (code & 0x3FF):04x}"]


def _object(pairs: list[tuple[str, str]]) -> str:
    """Keys may come twice: a reader may take either."""
    return "{" + " , ".join(f"{key}:{value}" for key, value in pairs) + "}"


KEYS = st.one_of(
    NAMES.map(json.dumps), NAMES.map(lambda n: json.dumps(n, ensure_ascii=False)), NAMES.flatmap(spelt)
)
VALUES = st.recursive(
    LEAVES.map(lambda leaf: json.dumps(leaf, ensure_ascii=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.lists(st.tuples(KEYS, inner), max_size=4).map(_object),
    ),
    max_leaves=8,
)


BODIES = st.tuples(
    st.lists(st.tuples(KEYS, VALUES), max_size=5).map(_object),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"]),
).map(lambda pair: pair[0].encode(pair[1], errors="surrogatepass"))


def all_keys(raw: bytes) -> set[str]:
    """Every key at any depth, those that a later one hides among them, as an engine's parser sees them."""
    found: set[str] = set()

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.update(name for name, _ in pairs)
        return dict(pairs)

    json.loads(raw, object_pairs_hook=note)
    return found


@given(BODIES)
def test_no_parser_finds_a_reserved_key_in_what_an_engine_gets_however_it_was_spelt(raw: bytes) -> None:
    try:
        body = parse_object(raw)
    except InvalidArgument:
        return
    strip_reserved(body)
    sent = json.loads(encode(body))
    assert sent == body
    read = {name: value for name, value in sent.items() if name not in CONTENT_FIELDS}
    assert not all_keys(encode(read)) & set(RESERVED_FIELDS)


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"a": 1, "kv\u005ftransfer_params": 1}',
        b'{"a": 1, "kvlease": {}, "kvlease": {"keep": 1}}',
        b'{"a": 1, "vllm_xargs": {"kv_transfer_params": {}}}',
        '{"a": 1, "ec_transfer_params": 1}'.encode("utf-8-sig"),
    ],
)
def test_a_reserved_key_is_removed_however_it_is_spelt(raw: bytes) -> None:
    body = parse_object(raw)
    strip_reserved(body)
    assert body == {"a": 1}


@pytest.mark.parametrize("raw", [b"\xff", b"{kvlease", '{"a": 1}'.encode("utf-16"), b'{"a": 1}\0', b"[]"])
def test_a_body_that_cannot_be_judged_is_not_passed_on(raw: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_object(raw)


@given(VALUES.filter(lambda text: text.startswith("{")))
def test_nothing_reserved_is_left_outside_of_what_the_client_says(text: str) -> None:
    body = json.loads(text)
    said = {name: json.dumps(body[name]) for name in CONTENT_FIELDS & set(body)}
    strip_reserved(body)
    rest = {name: value for name, value in body.items() if name not in CONTENT_FIELDS}
    assert not all_keys(json.dumps(rest).encode()) & set(RESERVED_FIELDS)
    assert {name: json.dumps(body[name]) for name in said} == said
