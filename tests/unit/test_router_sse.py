"""Events of a stream: split anywhere, read, cleaned."""

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.router.apis.choices import ChoicesDialect, ChoicesReader
from kvlease.router.dialect import Api
from kvlease.router.ports import LegError
from kvlease.router.sse import EVENT_BYTES_MAX, EventSplitter, StreamCleaner

HIDES_USAGE = ChoicesDialect(Api.CHAT, {"stream": True})
SHOWS_USAGE = ChoicesDialect(Api.CHAT, {"stream": True, "stream_options": {"include_usage": True}})


def event(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def choice(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


EVENTS = [b"data: a\n\n", b": ping\r\n\r\n", b"event: x\ndata: b\rdata: c\r\r", b"\n\n", b"data: [DONE]\n\n"]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.data())
def test_events_come_out_whole_however_the_bytes_were_split(events: list[bytes], data: st.DataObject) -> None:
    text = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    splitter = EventSplitter()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        got += splitter.feed(text[start:end])
    assert got == events
    assert splitter.rest == b""


def test_the_beginning_of_an_event_waits_for_its_end() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.rest == b"data: a\n"
    assert splitter.feed(b"\n") == [b"data: a\n\n"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_long_event_in_many_pieces_is_searched_once(end: bytes) -> None:
    long = b"event: x" + end + b"data: " + b"x" * (EVENT_BYTES_MAX // 2) + end + end
    splitter = EventSplitter()
    begun_s = time.process_time()
    got = [event for at in range(0, len(long), 1 << 13) for event in splitter.feed(long[at : at + (1 << 13)])]
    assert got == [long]
    assert time.process_time() - begun_s < 5.0


def test_an_endless_event_breaks_the_stream() -> None:
    splitter = EventSplitter()
    for _ in range(EVENT_BYTES_MAX // (1 << 20)):
        splitter.feed(b"x" * (1 << 20))
    with pytest.raises(LegError):
        splitter.feed(b"x")


def test_a_reply_is_put_together_from_its_deltas() -> None:
    reader = ChoicesReader(choices=1)
    calls = [
        {"index": 0, "id": "call", "function": {"name": "f", "arguments": None}},
        {"index": 0, "function": {"arguments": '{"a"'}},
        {"index": 1, "id": "other", "function": {"name": "g", "arguments": ""}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    reader.read({"choices": [choice(role="assistant", content=None)]})
    reader.read({"choices": [choice(content="a")]})
    reader.read({"choices": [choice(index=1, content="another choice")]})
    for call in calls:
        reader.read({"choices": [choice(tool_calls=[call])]})
    reader.read({"choices": [choice(finish="tool_calls", content="b")]})
    reply = reader.reply()
    assert reply.text == "ab"
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in reply.tool_calls] == [
        ("call", "f", '{"a": 1}'),
        ("other", "g", ""),
    ]
    assert reader.finished_well


def test_a_turn_has_ended_well_when_every_choice_has() -> None:
    reader = ChoicesReader(choices=2)
    reader.read({"choices": [choice(finish="stop")]})
    assert not reader.finished_well
    reader.read({"choices": [choice(index=1, finish="length")]})
    assert reader.finished_well


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [choice(finish="error")]},
        {"choices": [choice(finish="abort")]},
        {"choices": [choice(finish="stop")], "error": {"message": "x"}},
        {},
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"index": "x", "delta": 1}]},
    ],
)
def test_anything_else_is_no_good_end(chunk: dict[str, Any]) -> None:
    reader = ChoicesReader(choices=1)
    reader.read(chunk)
    assert not reader.finished_well


@pytest.mark.parametrize(
    ("chunks", "awaits"),
    [
        ([choice(content="x", finish="stop")], False),
        ([choice(finish="tool_calls")], True),
        ([choice(finish="function_call")], True),
        # A tool that the client chose by name: the engine says "stop".
        (
            [choice(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f"}}]), choice(finish="stop")],
            True,
        ),
    ],
)
def test_a_reply_that_calls_tools_awaits_them(chunks: list[dict[str, Any]], awaits: bool) -> None:
    reader = ChoicesReader(choices=1)
    for chunk in chunks:
        reader.read({"choices": [chunk]})
    assert reader.awaits_tools is awaits


def test_events_that_hold_nothing_of_ours_pass_byte_by_byte() -> None:
    cleaner = StreamCleaner(ChoicesReader(1), HIDES_USAGE)
    for raw in (b": comment\n\n", b"data:  {no json\n\n", b"data: 1\n\n", b'data:{"a": 1}\r\n\r\n', b"\n\n"):
        assert cleaner.take(raw) == raw


def test_the_end_of_a_stream_is_seen_however_it_is_written() -> None:
    for raw in (b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n"):
        cleaner = StreamCleaner(ChoicesReader(1), HIDES_USAGE)
        assert cleaner.take(raw) == raw
        assert cleaner.done


def test_parameters_are_cut_out_of_an_event_and_its_other_lines_stay() -> None:
    cleaner = StreamCleaner(ChoicesReader(1), SHOWS_USAGE)
    raw = b"event: x\nid: 7\ndata: " + json.dumps({"a": "é", "kv_transfer_params": {}}).encode() + b"\n\n"
    assert cleaner.take(raw) == 'event: x\nid: 7\ndata: {"a":"é"}\n\n'.encode()


def test_an_integer_of_more_than_64_bits_keeps_its_digits_in_an_event_that_is_written_again() -> None:
    cleaner = StreamCleaner(ChoicesReader(1), HIDES_USAGE)
    assert cleaner.take(b'data: {"x":12345678901234567890123,"usage":null}\n\n') == (
        b'data: {"x":12345678901234567890123}\n\n'
    )


def test_half_of_a_surrogate_pair_stays_escaped_in_an_event_that_is_written_again() -> None:
    cleaner = StreamCleaner(ChoicesReader(1), HIDES_USAGE)
    assert cleaner.take(b'data: {"x":"\\ud83d","usage":null}\n\n') == b'data: {"x":"\\ud83d"}\n\n'


def test_usage_nobody_asked_for_is_cut_out_and_counted() -> None:
    reader = ChoicesReader(1)
    cleaner = StreamCleaner(reader, HIDES_USAGE)
    assert cleaner.take(event({"choices": [choice(content="x")], "usage": None})) == (
        b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
    )
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert cleaner.take(event({"choices": [], "usage": usage})) == b""
    counts = reader.usage
    assert (counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens) == (3, 2, 1)


def test_usage_that_was_asked_for_passes() -> None:
    cleaner = StreamCleaner(ChoicesReader(1), SHOWS_USAGE)
    raw = event({"choices": [], "usage": {"prompt_tokens": 3}})
    assert cleaner.take(raw) == raw


TEXTS = st.text(max_size=8) | st.sampled_from(
    ['"', "\\", 'a","content":"b', "\n", "another text", "\ud83d", "\u00e9\u2028", "</s>"]
)
RAW = st.sampled_from(
    [b'a","content":"b', b"a\nb", b"a\rb", b"\xff", b'\\"', b"\\", b'"', b"\\ud83d", b'"}]} {"']
)


BESIDE: list[dict[str, Any]] = [
    {},
    {"content": "x"},
    {"text": "another text"},
    {"usage": None},
    {"created": 1 << 70},
]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Events of which most differ in their text only, as engines write them or as nobody should."""
    fixed = draw(
        st.sampled_from(
            [{}, {"content": "x"}, {"text": "another text"}, {"usage": None}, {"created": 1 << 70}]
        )
    )
    plain = draw(st.booleans())
    events: list[bytes] = []
    for text in draw(st.lists(TEXTS, max_size=8)):
        kind = draw(
            st.sampled_from(["chat", "chat", "chat", "completion", "other", "finish", "call", "failed"])
        )
        said: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        if kind == "completion":
            said = {"index": 0, "text": text, "finish_reason": None}
        elif kind == "other":
            said["index"] = 1
        elif kind == "finish":
            said["finish_reason"] = "stop"
        elif kind == "call":
            said["delta"]["tool_calls"] = [
                {"index": 0, "id": "c", "function": {"name": "f", "arguments": text}}
            ]
        elif kind == "failed":
            said["finish_reason"] = "error"
        whole = json.dumps({"id": "1", **fixed, "choices": [said]}, ensure_ascii=plain).encode(
            errors="surrogatepass"
        )
        events.append(b"data: " + whole + b"\n\n")
    if events:
        torn = events[0].partition(b'"content": "')
        events += [torn[0] + torn[1] + raw + b'"' + torn[2].partition(b'"')[2] for raw in draw(st.lists(RAW))]
    return draw(st.permutations(events))


@given(streams())
def test_events_alike_are_passed_and_read_as_if_each_was_the_first(events: list[bytes]) -> None:
    dialect = ChoicesDialect(Api.CHAT, {"stream": True, "stream_options": {"include_usage": True}, "n": 2})
    one, other = dialect.reader(), dialect.reader()
    cleaner = StreamCleaner(one, dialect)
    for event in [*events, *events]:
        assert cleaner.take(event) == StreamCleaner(other, dialect).take(event)
        assert (one.reply(), one.failed, one.finished_well, one.awaits_tools) == (
            other.reply(),
            other.failed,
            other.finished_well,
            other.awaits_tools,
        )


def test_of_events_alike_only_the_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ChoicesReader(choices=1)
    cleaner = StreamCleaner(reader, SHOWS_USAGE)
    cleaner.take(event({"choices": [choice(role="assistant", content="")]}))
    cleaner.take(event({"choices": [choice(content="a")]}))
    with monkeypatch.context() as patched:
        patched.delattr(ChoicesReader, "read")
        for text in ("b", 'c"', "\u00e9\n"):
            cleaner.take(event({"choices": [choice(content=text)]}))
    cleaner.take(event({"choices": [choice(finish="stop")]}))
    assert (reader.reply().text, reader.finished_well) == ('abc"\u00e9\n', True)


def test_a_long_text_takes_few_times_its_own_memory() -> None:
    reader = ChoicesReader(choices=1)
    long = event({"choices": [choice(content="x" * 500_000)]})
    tracemalloc.start()
    try:
        assert StreamCleaner(reader, SHOWS_USAGE).take(long) == long
        assert tracemalloc.get_traced_memory()[1] < 20 * len(long)
    finally:
        tracemalloc.stop()
    assert reader.reply().text == "x" * 500_000
