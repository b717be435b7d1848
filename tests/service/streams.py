"""Conversion of a streamed response into the body that the same request gets without streaming."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

_PARTS = ("token_ids", "prompt_token_ids", "prompt_logprobs")


def events(body: str) -> list[dict[str, Any]]:
    """Return the JSON of the events of a stream, and check that the last event is [DONE]."""
    data = [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream into `choices` and the fields beside it, without usage and timings.

    Checks that no field is repeated, that a chunk has at most one choice, that nothing follows a finish reason, and
    that each tool call begins with its name and id.
    """
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for chunk in chunks:
        for name in _PARTS[1:]:
            if name in chunk:
                assert name not in whole, f"{name} twice"
                whole[name] = chunk[name]
        assert len(chunk["choices"]) <= 1
        for piece in chunk["choices"]:
            _add(choices.setdefault(piece["index"], {"index": piece["index"], "logprobs": None}), piece)
    for choice in choices.values():
        if choice.get("message", {}).get("tool_calls"):
            choice["message"]["content"] = choice["message"]["content"] or None
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    assert choice.get("finish_reason") is None, "a chunk follows the finish reason"
    if "delta" in piece:
        delta = piece["delta"]
        if "message" not in choice:
            assert delta == {"role": "assistant", "content": ""}
            assert piece["logprobs"] is None
            choice["message"] = {**delta, "refusal": None}
        else:
            assert "role" not in delta
            _extend(choice["message"], delta)
    else:
        choice["text"] = choice.get("text", "") + piece["text"]
    if (logprobs := piece["logprobs"]) is not None:
        choice["logprobs"] = _extended(choice["logprobs"], logprobs)
    if "token_ids" in piece:
        choice["token_ids"] = choice.get("token_ids", []) + piece["token_ids"]
    for name in _PARTS[1:]:
        if name in piece:
            assert name not in choice, f"{name} twice"
            choice[name] = piece[name]
    choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]


def _extend(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a chat message."""
    for name in delta.keys() & {"content", "reasoning_content", "reasoning"}:
        message[name] = message.get(name, "") + delta[name]
    for piece in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            assert piece["function"].keys() == {"name", "arguments"}
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
        else:
            assert piece.keys() == {"index", "function"}, "only the first piece of a call has its id"
            assert piece["index"] == len(calls) - 1
            assert piece["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]


def _extended(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    if first is None:
        return second
    return {name: value if value is None else first[name] + value for name, value in second.items()}


def assert_close(first: Any, second: Any) -> None:
    """Check that two JSON values are equal. Floats may differ by 1e-5, as logprobs do in another batch."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert_close(value, second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_close(one, other)
    elif isinstance(first, float):
        assert first == pytest.approx(second, abs=1e-5)
    else:
        assert first == second
