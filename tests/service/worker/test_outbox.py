"""What gathers on the way from the engine to an API process."""

from queue import SimpleQueue

from hypothesis import given
from hypothesis import strategies as st

from service.ipc.messages import Event, TokenDelta
from service.worker.worker import gathered


def _delta(number: int) -> TokenDelta:
    return TokenDelta(
        uid="a", attempt=0, index=number, token_ids=(number,), text="", logprobs=None, prompt_logprobs=None, finish=None
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1))
def test_all_that_waits_goes_at_once_to_its_process_and_in_order(steps: list[tuple[int, int]]) -> None:
    outbox: SimpleQueue[tuple[int, list[Event]]] = SimpleQueue()
    sent: dict[int, list[Event]] = {}
    number = 0
    for api_id, count in steps:
        events: list[Event] = [_delta(number + i) for i in range(count)]
        number += count
        sent.setdefault(api_id, []).extend(events)
        outbox.put((api_id, events))
    assert gathered(outbox) == sent
    assert outbox.empty()
