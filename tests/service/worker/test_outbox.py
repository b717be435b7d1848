"""Outbox between the engine loop and the carrier thread."""

from queue import SimpleQueue

from hypothesis import given
from hypothesis import strategies as st

from service.ipc.messages import Event, TokenDelta
from service.worker.worker import gathered


def _delta(number: int) -> TokenDelta:
    return TokenDelta(
        uid="a", attempt=0, index=number, token_ids=(number,), text="", logprobs=None, prompt_logprobs=None, finish=None
    )


@given(st.lists(st.integers(0, 3), min_size=1))
def test_all_waiting_events_are_sent_together_and_in_order(steps: list[int]) -> None:
    outbox: SimpleQueue[list[Event]] = SimpleQueue()
    sent: list[Event] = []
    for count in steps:
        events: list[Event] = [_delta(len(sent) + i) for i in range(count)]
        sent.extend(events)
        outbox.put(events)
    assert gathered(outbox) == sent
    assert outbox.empty()
