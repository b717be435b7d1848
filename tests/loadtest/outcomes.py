"""Outcomes of simulated requests, for tests of reports and objectives."""

from typing import Any

from loadtest.client.outcome import ClientKind, Ending, Outcome


def outcome(index: int = 0, **changes: Any) -> Outcome:
    """Return a stream sent at second `index`: first token after 100 ms, three more 20 ms apart, end 10 ms later."""
    start = float(index)
    values: dict[str, Any] = {
        "index": index,
        "client": ClientKind.STREAMING,
        "ending": Ending.OK,
        "detail": "",
        "intended_seconds": start,
        "sent_seconds": start,
        "chunk_seconds": [start + 0.10, start + 0.12, start + 0.14, start + 0.16],
        "end_seconds": start + 0.17,
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "text": "abcd",
    }
    return Outcome(**values | changes)


def failed(index: int, ending: Ending, detail: str = "") -> Outcome:
    """Return a request that failed after 50 ms without a token."""
    return outcome(
        index,
        ending=ending,
        detail=detail,
        chunk_seconds=[],
        end_seconds=index + 0.05,
        prompt_tokens=0,
        completion_tokens=0,
        text="",
    )
