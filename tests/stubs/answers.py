"""Answers of the APIs whose answers are no choices, in the shapes of vLLM 0.32."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

_ids = itertools.count(1)


@dataclass(frozen=True)
class Counts:
    """The tokens of a turn, those of the prompt that were cached among them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def response(reply: str, counts: Counts, **fields: Any) -> dict[str, Any]:
    """A whole response of the Responses API."""
    number = next(_ids)
    item = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": reply, "annotations": [], "logprobs": None}],
    }
    return {
        "id": f"resp_{number}",
        "created_at": 1,
        "object": "response",
        "model": "tiny",
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "previous_response_id": None,
        "usage": {
            "input_tokens": counts.prompt_tokens,
            "output_tokens": counts.completion_tokens,
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "kv_transfer_params": None,
        **fields,
    }


def response_stream(reply: str, counts: Counts, **fields: Any) -> bytes:
    """The events of a streamed response."""
    whole = response(reply, counts, **fields)
    item = whole["output"][0]
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "content": [], "status": "in_progress"},
        },
        {
            "type": "response.content_part.added",
            **place,
            "part": {"type": "output_text", "text": "", "annotations": []},
        },
        *({"type": "response.output_text.delta", **place, "delta": text, "logprobs": []} for text in reply),
        {"type": "response.output_text.done", **place, "text": reply, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": item["content"][0]},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {**whole, "kv_transfer_params": {"secret": 1}}},
    ]
    return b"".join(
        named_event(str(event["type"]), {**event, "sequence_number": number})
        for number, event in enumerate(events)
    )


def message(reply: str, counts: Counts, **fields: Any) -> dict[str, Any]:
    """A whole message of the Messages API."""
    return {
        "id": f"chatcmpl-{next(_ids)}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": reply}],
        "model": "tiny",
        "stop_reason": "end_turn",
        "usage": message_usage(counts),
        **fields,
    }


def message_usage(counts: Counts) -> dict[str, Any]:
    """The counts as the Messages API splits them."""
    return {
        "input_tokens": counts.prompt_tokens - counts.cached_tokens,
        "output_tokens": counts.completion_tokens,
        "cache_read_input_tokens": counts.cached_tokens,
    }


def message_stream(reply: str, counts: Counts) -> bytes:
    """The events of a streamed message."""
    started = message("", counts, content=[], stop_reason=None)
    events = [
        {"type": "message_start", "message": {**started, "usage": {"input_tokens": 0, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            for text in reply
        ),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": message_usage(counts),
        },
        {"type": "message_stop"},
    ]
    return b"".join(named_event(str(event["type"]), event) for event in events)


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """One event of a stream whose events have names."""
    return f"event: {name}\n".encode() + b"data: " + json.dumps(data).encode() + b"\n\n"
