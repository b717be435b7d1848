"""Conversion of a stream of Anthropic's Messages API into the message that the same request gets without streaming."""

import json
from typing import Any

# Field of a block, and field of the deltas that are its pieces.
_PIECES = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
}


def message_events(body: str) -> list[dict[str, Any]]:
    """Return the data of the events of a stream, and check that each event has the name of its type."""
    *parts, last = body.split("\n\n")
    assert last == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the events of a stream into the message, and check their order, as Anthropic's clients need it."""
    first, *events, ending, last = events
    assert (first["type"], ending["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_index, arguments = None, ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (open_index, event["index"]) == (None, len(message["content"]))
                open_index, arguments = event["index"], ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                block, delta = message["content"][-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    field, piece = _PIECES[delta["type"]]
                    block[field] += delta[piece]
            case kind:
                assert (kind, event["index"]) == ("content_block_stop", open_index)
                open_index = None
                if arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
    assert open_index is None
    return {**message, **ending["delta"], "usage": ending["usage"]}
