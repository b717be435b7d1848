"""Fake worker that completes each prompt with a given text, and a strict reader of the events of `/v1/responses`."""

import json
from typing import Any

from service.ipc.messages import FinishReason, Submit, TokenLogprob, decode_commands, encode_events
from tests.service.echo import EchoChannel
from tests.service.sequences import make_delta, make_finish


class ScriptedChannel(EchoChannel):
    """Channel to a fake worker that completes each prompt with `text`, in deltas of `width` one-byte tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.text = "Hi there."
        self.width = 1
        self.reason = FinishReason.STOP

    def submit(self, message: bytes) -> None:
        submits = [command for command in decode_commands(message).commands if isinstance(command, Submit)]
        self.submits += submits
        if self.answers:
            for submit in submits:
                self.frontend.receive(encode_events(self.deltas(submit)))
        else:
            super().submit(message)

    def deltas(self, submit: Submit) -> list[Any]:
        """Return the token deltas of a completion with `text`."""
        pieces = [self.text[start : start + self.width] for start in range(0, len(self.text), self.width)] or [""]
        starts = [len("".join(pieces[:number]).encode()) for number in range(len(pieces))]
        finish = make_finish(self.reason, num_cached_tokens=2)
        return [
            make_delta(
                submit.uid,
                index=start,
                ids=tuple(piece.encode()),
                text=piece,
                logprobs=None if submit.params.logprobs is None else tuple(map(_logprob, piece.encode())),
                finish=finish if start == starts[-1] else None,
            )
            for start, piece in zip(starts, pieces, strict=True)
        ]


def _logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, top=((token_id, -0.5), (120, -1.5)))


def read_events(body: str) -> list[dict[str, Any]]:
    """Return the JSON of the events of a stream. Checks their names, and that their numbers count from the first."""
    assert "[DONE]" not in body
    found = []
    for part in body.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if not line.startswith(":"))
        if fields:
            event = json.loads(fields["data"])
            assert fields["event"] == event["type"]
            found.append(event)
    first = found[0]["sequence_number"]
    assert [event["sequence_number"] for event in found] == list(range(first, first + len(found)))
    return found


def replay(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response at the end of a stream. Checks the events' order, and that deltas make the items."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    output: list[dict[str, Any]] = []
    rest = events[2:-1]
    while rest:
        added = rest.pop(0)
        assert (added["type"], added["output_index"]) == ("response.output_item.added", len(output))
        output.append(_read_item(added["item"], len(output), rest))
    response: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return response


def _read_item(begun: dict[str, Any], index: int, rest: list[dict[str, Any]]) -> dict[str, Any]:
    """Remove the events of one item from `rest`, and return the item. Checks each event."""
    assert begun["status"] == "in_progress"
    place: dict[str, Any] = {"item_id": begun["id"], "output_index": index}
    kind = {"message": "output_text", "reasoning": "reasoning_text"}.get(begun["type"], "function_call_arguments")
    is_call = kind == "function_call_arguments"
    place |= {} if is_call else {"content_index": 0}
    if not is_call:
        added = rest.pop(0)
        assert (added["type"], added["part"]["text"]) == ("response.content_part.added", "")
        assert added.items() >= place.items()
    text, logprobs = "", []
    while rest[0]["type"] == f"response.{kind}.delta":
        delta = rest.pop(0)
        assert delta.items() >= place.items()
        text += delta["delta"]
        logprobs += delta.get("logprobs", [])
    done = rest.pop(0)
    assert done["type"] == f"response.{kind}.done"
    assert done.items() >= place.items()
    assert done["arguments" if is_call else "text"] == text
    if not is_call:
        part = rest.pop(0)
        assert part["type"] == "response.content_part.done"
        assert part.items() >= place.items()
        assert part["part"]["text"] == text
        assert done.get("logprobs", []) == part["part"].get("logprobs", []) == logprobs
    ended = rest.pop(0)
    item: dict[str, Any] = ended["item"]
    assert (ended["type"], ended["output_index"]) == ("response.output_item.done", index)
    assert (item["id"], item["type"]) == (begun["id"], begun["type"])
    assert item["arguments"] == text if is_call else item["content"] == [part["part"]]
    return item


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return output items without the ids, which differ between two responses."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]
