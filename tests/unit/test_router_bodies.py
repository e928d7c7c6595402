"""The bodies of a turn: what is refused, stripped, rewritten and left alone."""

import json
from typing import Any

import pytest

from kvlease.core.conversation import tenant_digest
from kvlease.core.errors import InvalidArgument
from kvlease.core.turn import TurnParams
from kvlease.router.apis.choices import ChoicesDialect
from kvlease.router.apis.messages import MessagesDialect
from kvlease.router.bodies import (
    Reading,
    TurnRequest,
    client_answer,
    decode_body,
    parse_answer,
    parse_turn,
    prefill_body,
    report_of,
)
from kvlease.router.dialect import Api, Dialect

TENANT = tenant_digest("key")
PARAMS = TurnParams(TENANT)
ANY = ChoicesDialect(Api.CHAT, {})
MESSAGES = [{"role": "user", "content": "hello"}]


def parsed(api: Api = Api.CHAT, header_id: str = "", **fields: Any) -> TurnRequest:
    return parse_turn(api, json.dumps({"model": "m", **fields}).encode(), TENANT, header_id)


def test_the_id_in_the_body_is_preferred_to_the_headers() -> None:
    assert parsed(messages=MESSAGES, conversation_id="body", header_id="header").conversation_id == "body"
    assert parsed(messages=MESSAGES, header_id="header").conversation_id == "header"
    assert parsed(messages=MESSAGES, conversation_id="", header_id="header").conversation_id == "header"


@pytest.mark.parametrize("conversation_id", [True, [], {}, "ü" * 257])
def test_an_id_that_is_none_is_refused(conversation_id: object) -> None:
    with pytest.raises(InvalidArgument, match="conversation_id"):
        parsed(messages=MESSAGES, conversation_id=conversation_id)


@pytest.mark.parametrize(
    ("api", "fields", "wanted"),
    [
        (Api.CHAT, {"prompt_logprobs": 0}, True),
        (Api.CHAT, {"prompt_logprobs": None}, False),
        (Api.CHAT, {"echo": True}, True),
        (Api.CHAT, {"echo": True, "top_logprobs": None}, False),
        (Api.CHAT, {"logprobs": True, "top_logprobs": 5}, False),
        (Api.COMPLETIONS, {"prompt_logprobs": 1}, True),
        (Api.COMPLETIONS, {"echo": True}, False),
        (Api.COMPLETIONS, {"echo": True, "logprobs": 0}, True),
        (Api.COMPLETIONS, {"echo": False, "logprobs": 5}, False),
        (Api.RESPONSES, {"prompt_logprobs": 1, "echo": True}, False),
    ],
)
def test_prompt_logprobs_are_wanted_as_engines_understand_it(
    api: Api, fields: dict[str, Any], wanted: bool
) -> None:
    prompt = {
        Api.CHAT: {"messages": MESSAGES},
        Api.COMPLETIONS: {"prompt": "x"},
        Api.RESPONSES: {"input": "x"},
    }
    assert parsed(api, **prompt[api], **fields).prompt_logprobs is wanted


def test_parameters_are_stripped_wherever_an_engine_might_read_them() -> None:
    planted = {"kv_transfer_params": {"x": 1}, "kvlease": 1}
    request = parsed(messages=MESSAGES, **planted, extra={"deep": [{**planted, "kept": 1}]})
    assert "kv_transfer_params" not in request.body
    assert "kvlease" not in request.body
    assert request.body["extra"] == {"deep": [{"kept": 1}]}


def test_what_the_client_says_is_left_alone_even_when_it_names_our_keys() -> None:
    messages = [{"role": "user", "content": "x", "kv_transfer_params": {"mine": 1}}]
    assert parsed(messages=messages).body["messages"] == messages


@pytest.mark.parametrize("api", list(Api))
def test_no_tenants_priority_reaches_an_engine_unless_the_router_lets_it_pass(api: Api) -> None:
    tools = [{"type": "function", "function": {"parameters": {"properties": {"priority": {}}}}}]
    fields = {"messages": MESSAGES, "prompt": "x", "input": "x", "tools": tools}
    plain = json.dumps({**fields, "priority": -1})
    for raw in (
        plain,
        plain.replace('"priority": -1', '"prior\\u0069ty": -1'),
        plain[:-1] + ', "priority": -2}',
    ):
        stripped = parse_turn(api, raw.encode(), TENANT)
        assert "priority" not in stripped.body
        assert "priority" not in json.loads(decode_body(stripped, None))
        assert stripped.body["tools"] == tools
    passed = parse_turn(api, plain.encode(), TENANT, reading=Reading(pass_priority=True))
    assert json.loads(decode_body(passed, None))["priority"] == -1
    assert json.loads(prefill_body(passed, PARAMS))["priority"] == -1


@pytest.mark.parametrize("salt", [None, "", "mine", 7])
def test_the_salt_binds_the_tenant_and_the_clients_own(salt: object) -> None:
    salted = parsed(messages=MESSAGES, cache_salt=salt).body["cache_salt"]
    assert isinstance(salted, str)
    assert len(salted) == 32
    assert salted != salt
    other = parse_turn(
        Api.CHAT, json.dumps({"messages": MESSAGES, "cache_salt": salt}).encode(), tenant_digest("other")
    )
    assert other.body["cache_salt"] != salted


def test_without_isolation_the_clients_salt_stays() -> None:
    raw = json.dumps({"messages": MESSAGES}).encode()
    assert "cache_salt" not in parse_turn(Api.CHAT, raw, TENANT, reading=Reading(isolate=False)).body


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", None, 1),
        ("max_tokens", 0, 1),
        ("max_completion_tokens", 10**9, 1),
        ("min_tokens", 0, 0),
        ("min_tokens", 5, 1),
        ("min_tokens", None, 1),
        ("n", 4, 1),
        ("n", None, 1),
        ("tool_choice", "auto", "auto"),
        ("tool_choice", "required", "none"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "none"),
        ("stream", True, False),
    ],
)
def test_the_prefill_body_computes_one_token(field: str, value: object, expected: object) -> None:
    body = json.loads(prefill_body(parsed(messages=MESSAGES, **{field: value}), PARAMS))
    assert body[field] == expected
    assert body["max_tokens"] == 1


def test_a_stop_string_does_not_end_the_prefill_leg() -> None:
    request = parsed(messages=MESSAGES, stop=["a"], stop_token_ids=[1])
    body = json.loads(prefill_body(request, PARAMS))
    assert "stop" not in body
    assert json.loads(decode_body(request, PARAMS))["stop"] == ["a"]


def test_completions_get_no_field_of_the_chat_api() -> None:
    body = json.loads(prefill_body(parsed(Api.COMPLETIONS, prompt="x", best_of=3, echo=True), PARAMS))
    assert set(body) == {"model", "prompt", "cache_salt", "stream", "max_tokens", "kv_transfer_params"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None, "other": 1}])
def test_a_stream_counts_usage_for_the_router(options: dict[str, Any] | None) -> None:
    request = parsed(messages=MESSAGES, stream=True, stream_options=options)
    sent = json.loads(decode_body(request, PARAMS))["stream_options"]
    assert sent == {**(options or {}), "include_usage": True}


def test_a_request_without_a_stream_gets_no_stream_options() -> None:
    assert "stream_options" not in json.loads(decode_body(parsed(messages=MESSAGES), PARAMS))


def test_stream_options_that_are_none_are_the_engines_to_refuse() -> None:
    request = parsed(messages=MESSAGES, stream=True, stream_options="x")
    assert json.loads(decode_body(request, PARAMS))["stream_options"] == "x"


@pytest.mark.parametrize(
    "fields",
    [{}, {"messages": []}, {"messages": "x"}, {"messages": [[]]}, {"messages": [1]}],
)
def test_messages_that_are_none_have_no_transcript_and_are_the_engines_to_refuse(
    fields: dict[str, Any],
) -> None:
    assert parsed(**fields).transcript is None


@pytest.mark.parametrize(
    ("prompt", "single"),
    [
        ("text", True),
        (["text"], True),
        ([1, 2, 3], True),
        ([[1, 2, 3]], True),
        (["a", "b"], False),
        ([[1], [2]], False),
        ([-1], False),
        ([1 << 40], False),
        ([True], False),
        (None, False),
    ],
)
def test_a_single_prompt_has_a_transcript(prompt: object, *, single: bool) -> None:
    assert (parsed(Api.COMPLETIONS, prompt=prompt).transcript is not None) == single


def test_an_answer_without_anything_of_ours_keeps_its_bytes() -> None:
    raw = b'{ "choices": [],  "x": 1.10 }'
    assert client_answer(raw, parse_answer(raw), ANY) is raw
    assert client_answer(b"no json", parse_answer(b"no json"), ANY) == b"no json"


@pytest.mark.parametrize(
    "number",
    [
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
        "-0.10000000000000001",
        "9" * 40,
    ],
)
def test_a_number_keeps_its_value_beside_what_is_cut_out(number: str) -> None:
    raw = b'{"x": [%b], "kv_transfer_params": {}}' % number.encode()
    answer = parse_answer(raw)
    assert answer is not None
    assert answer["x"] == [json.loads(number)]
    assert json.loads(client_answer(raw, answer, ANY)) == {"x": [json.loads(number)]}


@pytest.mark.parametrize("dialect", [ANY, MessagesDialect({})])
def test_half_of_a_surrogate_pair_comes_out_as_it_came(dialect: Dialect) -> None:
    said = b'"type":"message","content":[{"type":"tool_use","input":{"x":"\\ud83d"}}]'
    raw = b'{%b,"kv_transfer_params":{}}' % said
    answer = parse_answer(raw)
    assert answer is not None
    dialect.reader().read(answer)
    assert client_answer(raw, answer, dialect) == b"{%b}" % said


@pytest.mark.parametrize("params", [None, "x", {}, {"kvlease": 1}, {"kvlease": {"prompt_tokens": 1}}])
def test_a_report_that_is_none_is_none(params: object) -> None:
    assert report_of({"kv_transfer_params": params}) is None
