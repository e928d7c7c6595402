"""Chains over what was said, and the conversations that they find."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core import conversation
from kvlease.core.conversation import (
    OPAQUE_PART_BYTES,
    SEGMENT_BYTES,
    ConversationIndex,
    Leaf,
    Reply,
    Transcript,
    cache_salt,
    conversation_key,
    message_transcript,
    prompt_transcript,
    tenant_digest,
)
from kvlease.core.cost import TokenEstimate
from kvlease.core.recent import Recent

TENANT = tenant_digest("key")
USER: dict[str, Any] = {"role": "user", "content": "hello there"}


def chat(
    *messages: dict[str, Any], tenant: str = TENANT, model: str = "m", tools: object = None
) -> Transcript:
    return message_transcript(tenant, model, messages, tools)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}


@pytest.mark.parametrize(
    ("reply", "echoed"),
    [
        (Reply("fine"), assistant(content="fine")),
        (Reply(" fine\n"), assistant(content="fine")),
        (Reply("fine"), assistant(content=[{"type": "text", "text": "fine"}])),
        (Reply("fine"), assistant(content="fine", reasoning_content="hm", refusal=None, tool_calls=[])),
        (Reply("", (CALL,)), assistant(content=None, tool_calls=[CALL])),
        (
            Reply("", (CALL,)),
            assistant(
                content="",
                tool_calls=[{**CALL, "function": {"name": "f", "arguments": '{"b":2,"a":1}'}, "index": 0}],
            ),
        ),
    ],
)
def test_a_reply_that_a_client_sends_back_extends_the_chain(reply: Reply, echoed: dict[str, Any]) -> None:
    leaf = chat(USER).leaf(reply)
    following = {"role": "user", "content": "123456"}
    assert chat(USER, echoed, following).suffix_bytes(leaf) == 6


@pytest.mark.parametrize(
    "request_",
    [
        chat({**USER, "content": "another"}, assistant(content="fine")),
        chat(USER, assistant(content="changed")),
        chat(USER),
        chat(USER, assistant(content="fine"), tenant=tenant_digest("other")),
        chat(USER, assistant(content="fine"), model="other"),
        chat(USER, assistant(content="fine"), tools=[{"type": "function"}]),
    ],
)
def test_another_history_tenant_model_or_set_of_tools_does_not_extend_it(request_: Transcript) -> None:
    leaf = chat(USER).leaf(Reply("fine"))
    assert request_.suffix_bytes(leaf) is None


@pytest.mark.parametrize("role", ["user", "system", "assistant", "a role of more letters than most"])
@pytest.mark.parametrize("content", [" hello\n", "", "é \ud800"])
def test_a_plain_message_has_the_key_of_one_with_fields_that_say_nothing(role: str, content: str) -> None:
    plain, longer = {"role": role, "content": content}, {"content": content, "role": role, "name": None}
    assert chat(plain) == chat(longer)


def test_a_dropped_message_does_not_extend_the_chain() -> None:
    history = (USER, assistant(content="fine"), {"role": "user", "content": "more"})
    leaf = chat(*history).leaf(Reply("sure"))
    assert chat(*history[:2]).suffix_bytes(leaf) is None


def test_nothing_after_the_leaf_is_a_suffix_of_no_bytes() -> None:
    leaf = chat(USER).leaf(Reply("fine"))
    assert chat(USER, assistant(content="fine")).suffix_bytes(leaf) == 0


def test_images_count_little_however_long_their_encoding() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 1_000_000}}
    assert chat({"role": "user", "content": [{"type": "text", "text": "abc"}, image]}).text_bytes == (
        OPAQUE_PART_BYTES + 3
    )


@pytest.mark.parametrize("length", [0, 10, SEGMENT_BYTES - 5, SEGMENT_BYTES, 3 * SEGMENT_BYTES + 1])
def test_a_prompt_extends_the_prompt_and_reply_before_it(length: int) -> None:
    prompt = "x" * length
    leaf = prompt_transcript(TENANT, "m", prompt).leaf(Reply("reply"))
    assert prompt_transcript(TENANT, "m", prompt + "reply and on").suffix_bytes(leaf) == 7
    assert prompt_transcript(TENANT, "m", prompt + "reply").suffix_bytes(leaf) == 0
    assert prompt_transcript(TENANT, "m", prompt + "Reply and on").suffix_bytes(leaf) is None
    assert prompt_transcript(TENANT, "m", prompt).suffix_bytes(leaf) is None


def test_a_prompt_of_token_ids_extends_the_ids_before_it() -> None:
    leaf = prompt_transcript(TENANT, "m", [1, 2, 3]).leaf(Reply("text that has no ids"))
    assert prompt_transcript(TENANT, "m", [1, 2, 3, 4]).suffix_bytes(leaf) == 8
    assert prompt_transcript(TENANT, "m", [1, 2, 4, 4]).suffix_bytes(leaf) is None


def test_at_most_sixteen_keys_travel() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(40)]
    assert len(chat(*messages).leaf(Reply("x")).keys) == 16


def test_the_index_finds_the_conversation_that_a_request_extends() -> None:
    index = ConversationIndex()
    leaf = chat(USER).leaf(Reply("fine"))
    index.put(b"one", leaf)
    found = index.find(chat(USER, assistant(content="fine"), USER))
    assert found is not None
    assert (found.owner, found.leaf, found.extends) == (b"one", leaf, True)


def test_the_index_tells_runs_apart_that_merely_begin_alike() -> None:
    index = ConversationIndex()
    index.put(b"one", chat(USER).leaf(Reply("fine")))
    assert index.find(chat(USER)) is None


def test_the_index_finds_a_history_whose_reply_was_changed_in_part_only() -> None:
    index = ConversationIndex()
    index.put(b"one", chat(USER).leaf(Reply("fine")))
    found = index.find(chat(USER, assistant(content="FINE"), USER))
    assert found is not None
    assert (found.owner, found.extends) == (b"one", False)


def test_the_index_finds_the_newest_of_several_leaves() -> None:
    index = ConversationIndex()
    second = (USER, assistant(content="fine"), USER)
    index.put(b"one", chat(USER).leaf(Reply("fine")))
    index.put(b"two", chat(*second).leaf(Reply("sure")))
    found = index.find(chat(*second, assistant(content="sure"), USER))
    assert found is not None
    assert found.owner == b"two"


def test_the_index_finds_prompts() -> None:
    index = ConversationIndex()
    prompt = "y" * 1000
    index.put(b"one", prompt_transcript(TENANT, "m", prompt).leaf(Reply("reply")))
    found = index.find(prompt_transcript(TENANT, "m", prompt + "reply, then"))
    assert found is not None
    assert found.extends
    assert index.find(prompt_transcript(TENANT, "m", "y" * 900)) is None


def test_the_index_forgets_its_oldest_leaf_at_its_bound() -> None:
    index = ConversationIndex(leaves_max=2)
    requests = [chat({"role": "user", "content": str(number)}) for number in range(3)]
    for number, request in enumerate(requests):
        index.put(bytes([number]), request.leaf(Reply("x")))
    found = [
        index.find(chat({"role": "user", "content": str(number)}, assistant(content="x")))
        for number in range(3)
    ]
    assert [entry is not None for entry in found] == [False, True, True]


def test_identities_depend_on_the_tenant() -> None:
    other = tenant_digest("other")
    assert conversation_key(TENANT, "c") != conversation_key(other, "c")
    assert cache_salt(TENANT, "s") != cache_salt(other, "s")
    assert cache_salt(TENANT, "s") != cache_salt(TENANT, "")
    assert conversation_key("ab", "c") != conversation_key("a", "bc")


def test_an_empty_leaf_is_extended_by_nothing() -> None:
    assert chat(USER).suffix_bytes(Leaf(())) is None


def test_estimates_learn_the_conversations_own_ratio() -> None:
    assert TokenEstimate().tokens(400) == 100
    learnt = TokenEstimate().learnt(prompt_tokens=900, text_bytes=600)
    assert learnt.tokens(100) == 150
    assert learnt.learnt(0, 600) == learnt
    assert learnt.learnt(900, 0) == learnt


def test_arguments_of_a_tool_nested_beyond_reason_are_taken_as_they_stand() -> None:
    function = {"name": "f", "arguments": "[" * 100_000}
    call = {"id": "call-1", "type": "function", "function": function}
    request = chat(USER)
    leaf = request.leaf(Reply("", (call,)))
    sent_back = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert chat(USER, sent_back, USER).suffix_bytes(leaf) is not None


def test_arguments_of_a_tool_of_any_depth_make_a_chain() -> None:
    for depth in range(200, 1200, 10):
        function = {"name": "f", "arguments": "[" * depth + "]" * depth}
        call = {"id": "call-1", "type": "function", "function": function}
        assert chat(USER).leaf(Reply("", (call,))).key


SAID: list[dict[str, Any]] = [
    USER,
    {"content": "hello there", "role": "user"},
    {"role": "tool", "content": "hello there"},
    {"role": "user", "content": None},
    {"role": "user", "content": 1},
    {"role": "user", "content": 1.0},
    {"role": "user", "content": True},
    {"role": "user", "content": "\ud83d"},
    {"role": "user", "content": [{"type": "text", "text": "hello there"}]},
    {"role": "tool", "tool_call_id": "call-1", "content": "hello there"},
    assistant(content=None, tool_calls=[CALL]),
    assistant(content=" a "),
]
TOOLS: list[object] = [None, [], [{"type": "function"}], [{"type": 1 << 80}], {"a": [0.5, "b"]}]


@given(st.lists(st.lists(st.sampled_from(SAID), max_size=5), max_size=5), st.sampled_from(TOOLS))
def test_what_is_recognised_has_the_keys_that_it_would_have_anew(
    histories: list[list[dict[str, Any]]], tools: object
) -> None:
    for history in histories:
        known = chat(*history, tools=tools)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(conversation, "_links", Recent[Any, Any](1))
            patched.setattr(conversation, "_roots", Recent[Any, Any](1))
            assert chat(*history, tools=tools) == known


def test_of_a_known_history_only_what_is_new_is_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[bytes] = []
    link = conversation._link  # pyright: ignore[reportPrivateUsage]

    def counted(root: bytes, previous: int, payload: bytes) -> int:
        digested.append(payload)
        return link(root, previous, payload)

    monkeypatch.setattr(conversation, "_link", counted)
    history = [{"role": "user", "content": f"{number} of a history of its own"} for number in range(20)]
    chat(*history)
    chat(*history, USER)
    assert len(digested) == 21
    chat(history[0], USER, *history[1:])
    assert len(digested) == 41
