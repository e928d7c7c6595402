"""Where clients name their conversations, and the nonces that some put before their prompts."""

import json
from typing import Any

import pytest

from kvlease.core.errors import InvalidArgument
from kvlease.router.bodies import Reading, parse_turn
from kvlease.router.dialect import Api
from kvlease.router.identity import SESSION_HEADERS, conversation_id_of, header_id
from kvlease.router.nonces import has_nonce, strip_nonce

SESSION = "0b0a8d1c-6f4e-4f0e-9b7e-1f3b6c0c9a11"
BILLING = "x-anthropic-billing-header: cc_version=2.1.88; cch=0a1b2;"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, ""),
        ({"X-Conversation-Id": "c"}, "c"),
        ({"X-Claude-Code-Session-Id": "s"}, "s"),
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a1"}, "s/a1"),
        ({"X-Opencode-Session": "ses_1", "X-Session-Affinity": "ses_1"}, "ses_1"),
        ({"X-Session-Id": "x"}, "x"),
        ({"session_id": "s", "conversation_id": "c"}, "s"),
        ({"Session-Id": "s", "Thread-Id": "t"}, "t"),
        ({"X-Conversation-Id": "", "Session-Id": "s"}, "s"),
        ({"X-Conversation-Id": "c", "Session-Id": "s", "X-Claude-Code-Agent-Id": "a1"}, "c"),
        ({"X-Session-Id": "x" * 513}, ""),
        ({"X-Session-Id": "x" * 513, "Session-Id": "s"}, "s"),
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a" * 511}, ""),
        ({"X-Session-Id": "\udcff\udcfe"}, ""),
    ],
)
def test_the_headers_that_agents_send_name_the_conversation(headers: dict[str, str], expected: str) -> None:
    assert header_id(headers, SESSION_HEADERS) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (None, ""),
        ("text", ""),
        ([], ""),
        ({"conversation_id": "m"}, "m"),
        ({"session_id": "s"}, "s"),
        ({"session_id": 7, "thread_id": "t"}, "t"),
        ({"session_id": "x" * 10_000}, ""),
        ({"user_id": f"user_ab12_account__session_{SESSION}"}, SESSION),
        ({"user_id": json.dumps({"device_id": "d", "session_id": SESSION})}, SESSION),
        ({"user_id": "{no json"}, ""),
        ({"user_id": "{}" * 5000}, ""),
        ({"user_id": "somebody"}, ""),
        ({"user_id": '{"session_id": "\\ud800"}'}, ""),
    ],
)
def test_metadata_names_the_conversation_or_nothing(metadata: object, expected: str) -> None:
    assert conversation_id_of({"metadata": metadata}) == expected


def test_the_body_is_preferred_to_a_header_and_a_header_to_metadata() -> None:
    metadata = {"session_id": "m"}
    assert conversation_id_of({"conversation_id": "b", "metadata": metadata}, "h") == "b"
    assert conversation_id_of({"metadata": metadata}, "h") == "h"


def test_a_key_of_prompt_caches_is_no_conversation() -> None:
    assert conversation_id_of({"prompt_cache_key": "shared-by-all"}) == ""


@pytest.mark.parametrize("conversation_id", [True, [], {}, "x" * 513])
def test_an_id_that_is_none_is_refused(conversation_id: object) -> None:
    with pytest.raises(InvalidArgument):
        conversation_id_of({"conversation_id": conversation_id})


# --- nonces --------------------------------------------------------------------------------------------------------

BODIES: list[tuple[Api, dict[str, Any], dict[str, Any]]] = [
    (
        Api.CHAT,
        {
            "messages": [
                {"role": "system", "content": f"{BILLING}\nYou code."},
                {"role": "user", "content": "x"},
            ]
        },
        {"messages": [{"role": "system", "content": "You code."}, {"role": "user", "content": "x"}]},
    ),
    (
        Api.CHAT,
        {
            "messages": [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}],
                }
            ]
        },
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}]},
    ),
    (
        Api.RESPONSES,
        {"input": "x", "instructions": f"{BILLING}\nYou code."},
        {"input": "x", "instructions": "You code."},
    ),
    (
        Api.RESPONSES,
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": f"{BILLING}\na"}]}]},
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": "a"}]}]},
    ),
]


@pytest.mark.parametrize(("api", "body", "stripped"), BODIES)
def test_a_nonce_before_the_prompt_is_told_and_taken_out_when_asked(
    api: Api, body: dict[str, Any], stripped: dict[str, Any]
) -> None:
    assert has_nonce(api, body)
    raw = json.dumps({"model": "m", **body}).encode()
    told = parse_turn(api, raw, "t")
    assert told.nonce
    assert told.body.items() >= body.items()
    silent = parse_turn(api, raw, "t", reading=Reading(strip_nonces=True))
    assert not silent.nonce
    assert {name: silent.body[name] for name in stripped} == stripped


def test_the_messages_api_has_no_nonce_since_its_engines_leave_it_out() -> None:
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}],
        "messages": [],
    }
    assert not has_nonce(Api.MESSAGES, body)
    strip_nonce(Api.MESSAGES, body)
    assert body["system"] == [{"type": "text", "text": "a"}]


def test_what_a_user_quotes_is_no_nonce() -> None:
    assert not has_nonce(Api.CHAT, {"messages": [{"role": "user", "content": BILLING}]})
    assert not has_nonce(Api.COMPLETIONS, {"prompt": BILLING})
