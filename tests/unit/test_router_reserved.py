"""Fields that are the router's: a scan of the bytes against a full parse."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.errors import InvalidArgument
from kvlease.router.reserved import (
    CONTENT_FIELDS,
    RESERVED_FIELDS,
    is_plain,
    strip_reserved,
    without_reserved,
)

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
def test_bytes_that_are_called_plain_hold_no_reserved_key_for_any_parser(raw: bytes) -> None:
    if is_plain(raw):
        assert not all_keys(raw) & set(RESERVED_FIELDS)


@given(st.dictionaries(st.sampled_from(["model", "user", "ключ"]), st.integers() | st.text("ab\U0001f600")))
def test_ordinary_bodies_are_plain(body: dict[str, Any]) -> None:
    assert is_plain(json.dumps(body, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params": 1}',
        b'{"a": [{"vllm_xargs": {}}]}',
        rb'{"kv\u005ftransfer_params": 1}',
        b'{"a": "\xff"}',
        '{"ec_transfer_params": 1}'.encode("utf-16-le"),
        '{"a": 1}'.encode("utf-32"),
    ],
)
def test_whatever_might_be_read_otherwise_is_not_plain(raw: bytes) -> None:
    assert not is_plain(raw)


@given(VALUES.filter(lambda text: text.startswith("{")))
def test_nothing_reserved_is_left_outside_of_what_the_client_says(text: str) -> None:
    body = json.loads(text)
    said = {name: json.dumps(body[name]) for name in CONTENT_FIELDS & set(body)}
    strip_reserved(body)
    rest = {name: value for name, value in body.items() if name not in CONTENT_FIELDS}
    assert not all_keys(json.dumps(rest).encode()) & set(RESERVED_FIELDS)
    assert {name: json.dumps(body[name]) for name in said} == said


def test_a_plain_body_is_passed_on_byte_by_byte_and_any_other_one_is_written_anew() -> None:
    plain = b'{ "model" : "m",  "x": 1.10 }'
    assert without_reserved(plain) is plain
    assert json.loads(without_reserved(rb'{"vllm_x\u0061rgs": 1, "a": [{"kvlease": 1, "b": "\u00e4"}]}')) == {
        "a": [{"b": "ä"}]
    }
    assert without_reserved(b'[{"kvlease": 1}]') == b"[{}]"


@pytest.mark.parametrize("raw", [b"\xff", b"{kvlease", '{"a": 1}'.encode("utf-16")])
def test_a_body_that_cannot_be_judged_is_not_passed_on(raw: bytes) -> None:
    with pytest.raises(InvalidArgument):
        without_reserved(raw)
