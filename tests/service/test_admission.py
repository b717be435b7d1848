"""The bound on what waits, and the Retry-After that follows from what was observed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.admission import Admission, Rate
from service.errors import Overloaded


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(*, running: int = 2, waiting: int = 2, tokens: int = 1000) -> tuple[Admission, Clock]:
    clock = Clock()
    admission = Admission(max_num_running=running, max_waiting_requests=waiting, max_waiting_tokens=tokens, clock=clock)
    return admission, clock


def test_sequences_are_bounded_by_what_runs_and_waits() -> None:
    admission, _ = make()
    admission.admit([10, 10, 10])
    with pytest.raises(Overloaded):
        admission.admit([10, 10])  # all or none
    admission.admit([10])
    with pytest.raises(Overloaded):
        admission.admit([10])
    admission.started(10)
    admission.ended()
    admission.admit([10])


def test_waiting_tokens_are_bounded_and_running_ones_are_not() -> None:
    admission, _ = make(running=10, tokens=100)
    admission.admit([80])
    with pytest.raises(Overloaded):
        admission.admit([30])
    admission.started(80)
    admission.admit([30])


def test_an_idle_server_admits_any_request() -> None:
    admission, _ = make(tokens=100)
    admission.admit([5000])
    with pytest.raises(Overloaded):
        admission.admit([1])


def test_retry_after_is_the_time_that_the_observed_rate_needs() -> None:
    admission, clock = make(running=1, waiting=3)
    admission.admit([10] * 4)
    for _ in range(200):  # one ends every 2 seconds
        clock.now += 2.0
        admission.started(10)
        admission.ended()
        admission.admit([10])
    with pytest.raises(Overloaded) as caught:
        admission.admit([10])
    assert caught.value.retry_after_seconds == pytest.approx(2.0, rel=0.1)
    with pytest.raises(Overloaded) as caught:
        admission.admit([10, 10, 10])
    assert caught.value.retry_after_seconds == pytest.approx(6.0, rel=0.1)


def test_retry_after_follows_the_tokens_where_they_are_the_bound() -> None:
    admission, clock = make(running=1000, tokens=100)
    admission.admit([100])
    for _ in range(200):  # 100 tokens begin every second
        clock.now += 1.0
        admission.started(100)
        admission.admit([100])
    with pytest.raises(Overloaded) as caught:
        admission.admit([50])
    assert caught.value.retry_after_seconds == pytest.approx(0.5, rel=0.1)


def test_a_slower_service_is_noticed_and_idle_time_is_not() -> None:
    rate = Rate()
    for _ in range(100):
        rate.add(1, 1.0)
    assert rate.seconds_for(1) == pytest.approx(1.0)
    for _ in range(50):
        rate.add(1, 4.0)
    assert rate.seconds_for(1) == pytest.approx(4.0, rel=0.05)

    admission, clock = make(running=1, waiting=0)
    for _ in range(10):
        admission.admit([1])
        clock.now += 1.0
        admission.started(1)
        admission.ended()
        clock.now += 3600.0
    admission.admit([1])
    with pytest.raises(Overloaded) as caught:
        admission.admit([1])
    assert caught.value.retry_after_seconds == pytest.approx(1.0, rel=0.1)


def test_before_anything_was_observed_the_wait_is_a_second_and_never_over_two_minutes() -> None:
    admission, clock = make(running=1, waiting=0)
    admission.admit([1])
    with pytest.raises(Overloaded) as caught:
        admission.admit([1])
    assert caught.value.retry_after_seconds == 1.0
    clock.now += 100_000.0
    admission.started(1)
    admission.ended()
    admission.admit([1])
    with pytest.raises(Overloaded) as caught:
        admission.admit([1])
    assert caught.value.retry_after_seconds <= 120.0


def seconds_refused(admission: Admission, token_counts: list[int]) -> float | None:
    """None when it was admitted."""
    try:
        admission.admit(token_counts)
    except Overloaded as refusal:
        return refusal.retry_after_seconds
    return None


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60), st.floats(0, 5)), max_size=40))
def test_the_bounds_hold_whatever_comes(arrivals: list[tuple[int, int, float]]) -> None:
    admission, clock = make(running=2, waiting=4, tokens=100)
    live: list[int] = []
    for count, tokens, seconds in arrivals:
        clock.now += seconds
        while (wait := seconds_refused(admission, [tokens] * count)) is not None:
            assert 0.0 < wait <= 120.0
            admission.started(live[0])
            admission.ended()
            del live[0]
        live += [tokens] * count
        assert admission.num_sequences == len(live) <= 6
        assert admission.num_waiting_tokens == sum(live)
        assert sum(live) <= 100 or len(live) <= 3
