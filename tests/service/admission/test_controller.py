"""Admission bounds, and the Retry-After computed from observed rates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.admission.controller import QueuePolicy, Rate
from service.protocol.errors import Overloaded, WaitTooLong
from tests.service.doorman import Service


def test_running_and_waiting_sequences_together_are_bounded() -> None:
    service = Service()
    service.admission.admit([10, 10, 10])
    assert service.refused([10, 10]) is not None  # a request is admitted with all its sequences or not at all
    service.admission.admit([10])
    assert service.refused([10]) is not None
    service.begin_and_end(10)
    service.admission.admit([10])


def test_tokens_of_waiting_sequences_are_bounded_and_tokens_of_running_sequences_are_not() -> None:
    service = Service(running=10, tokens=100)
    service.admission.admit([80])
    assert service.refused([30]) is not None
    service.admission.started(80)
    service.admission.admit([30])


def test_an_idle_server_admits_any_request() -> None:
    service = Service(tokens=100)
    service.admission.admit([5000])
    assert service.refused([1]) is not None


def test_retry_after_follows_the_observed_rate_of_endings() -> None:
    for num_sequences in (1, 3):
        service = Service(running=1, waiting=3)
        service.admission.admit([10] * 4)
        service.work(200, seconds=2.0)
        assert service.seconds_refused([10] * num_sequences) == pytest.approx(2.0 * num_sequences, rel=0.1)


def test_a_long_wait_is_predicted_before_the_first_ending() -> None:
    """Of 16 sequences that start 0.1 s apart on a full server, the rate of starts is known, and no ending."""
    service = Service(running=16, waiting=100)
    impatient = QueuePolicy(max_predicted_wait_seconds=0.05)
    service.admission.admit([10] * 16)
    for _ in range(15):
        service.clock.now += 0.1
        service.admission.started(10)
    service.admission.admit([10], impatient)
    service.clock.now += 0.1
    service.admission.started(10)
    with pytest.raises(WaitTooLong, match=r"would wait about 0\.\d s"):
        service.admission.admit([10], impatient)


def test_retry_after_follows_the_token_rate_if_the_token_bound_is_reached() -> None:
    service = Service(running=1000, tokens=100)
    service.admission.admit([100])
    for _ in range(200):  # 100 tokens begin every second
        service.clock.now += 1.0
        service.admission.started(100)
        service.admission.admit([100])
    assert service.seconds_refused([50]) == pytest.approx(0.5, rel=0.1)


def test_retry_after_is_spread_at_random() -> None:
    told = []
    for draw in (0.0, 1.0):
        service = Service(running=1, waiting=3)
        service.draw = draw
        service.admission.admit([10] * 4)
        service.work(200, seconds=2.0)
        told.append(service.seconds_refused([10]))
    assert told[1] == pytest.approx(1.25 * told[0])


def test_the_rate_follows_a_slower_service_and_ignores_idle_time() -> None:
    rate = Rate()
    for _ in range(100):
        rate.add(1, 1.0)
    assert rate.seconds_for(1) == pytest.approx(1.0)
    for _ in range(50):
        rate.add(1, 4.0)
    assert rate.seconds_for(1) == pytest.approx(4.0, rel=0.05)

    service = Service(running=1, waiting=0)
    for _ in range(10):
        service.admission.admit([1])
        service.clock.now += 1.0
        service.begin_and_end(1)
        service.clock.now += 3600.0
    service.admission.admit([1])
    assert service.seconds_refused([1]) == pytest.approx(1.0, rel=0.1)


def test_retry_after_is_one_second_before_any_observation_and_at_most_two_minutes() -> None:
    service = Service(running=1, waiting=0)
    service.admission.admit([1])
    assert service.seconds_refused([1]) == 1.0
    service.clock.now += 100_000.0
    service.begin_and_end(1)
    service.admission.admit([1])
    assert service.seconds_refused([1]) <= 120.0


def make_busy(*, patience: float = math.inf, num_waiting: int = 1) -> tuple[Service, QueuePolicy]:
    """Return a server with two running sequences, one ending per second, and `num_waiting` waiting; and terms."""
    service = Service(running=2, waiting=20)
    service.admission.admit([10, 10, 10])
    service.admission.started(10)
    service.admission.started(10)
    for _ in range(200):
        service.clock.now += 1.0
        service.admission.ended()
        service.admission.started(10)
        service.admission.admit([10])
    for _ in range(num_waiting - 1):
        service.admission.admit([10])
    return service, QueuePolicy(max_predicted_wait_seconds=patience)


def test_a_request_is_rejected_if_its_predicted_wait_exceeds_the_accepted_wait() -> None:
    service, terms = make_busy(patience=3.5, num_waiting=2)
    service.admission.admit([10], terms)  # behind two waiting sequences
    refusal = service.refused([10], terms)
    assert isinstance(refusal, WaitTooLong)
    assert refusal.retry_after_seconds == pytest.approx(0.5, rel=0.2)
    assert "would wait about 4.0 s" in refusal.message
    assert "longer than 3.5 s" in refusal.message
    service.admission.admit([10], QueuePolicy(max_predicted_wait_seconds=4.5))  # accepts a longer wait
    service.admission.admit([10])


def test_short_requests_are_not_judged_by_the_rate_of_long_requests_before_an_idle_moment() -> None:
    service = Service(running=64, waiting=1000, tokens=10**6)
    terms = QueuePolicy(max_predicted_wait_seconds=30.0)
    service.admission.admit([900] * 130)
    service.work(200, seconds=0.5, num_tokens=900)
    assert service.refused([900], terms) is not None
    for _ in range(130):
        service.begin_and_end(900)
    for number in range(500):  # 1000 arrive in a second, and 100 end
        service.clock.now += 0.001
        service.admission.admit([3], terms)
        if number % 10 == 9:
            service.begin_and_end(3)


def test_no_request_is_rejected_for_its_wait_while_a_slot_is_free_or_the_rate_is_unknown() -> None:
    impatient = QueuePolicy(max_predicted_wait_seconds=0.001)
    service = Service(running=2, waiting=20)
    for _ in range(10):
        service.admission.admit([10], impatient)
    service, _ = make_busy()
    service.admission.started(10)
    service.admission.ended()
    service.admission.ended()
    service.admission.admit([10], impatient)
    assert service.refused([10], impatient) is not None


def test_a_retry_gets_slightly_higher_bounds() -> None:
    service = Service(running=2, waiting=6)
    service.admission.admit([10] * 8)
    assert service.refused([10]) is not None
    returned = QueuePolicy(is_retry=True)
    service.admission.admit([10, 10], returned)
    assert service.refused([10], returned) is not None

    service, terms = make_busy(patience=3.5, num_waiting=3)
    assert service.refused([10], terms) is not None
    service.admission.admit([10], QueuePolicy(max_predicted_wait_seconds=3.5, is_retry=True))


def test_a_request_is_rejected_by_headers_only_if_the_smallest_request_would_be() -> None:
    service = Service(running=2, waiting=2)
    service.admission.reject_by_headers(QueuePolicy())
    service.admission.admit([10] * 3)
    service.admission.reject_by_headers(QueuePolicy())  # one more sequence fits, two do not
    assert service.refused([10, 10]) is not None
    service.admission.admit([10])
    with pytest.raises(Overloaded, match="the server is full"):
        service.admission.reject_by_headers(QueuePolicy())
    assert service.admission.num_sequences == 4

    service, terms = make_busy(patience=3.5, num_waiting=3)
    with pytest.raises(WaitTooLong, match=r"longer than 3\.5 s"):
        service.admission.reject_by_headers(terms)
    service.admission.reject_by_headers(QueuePolicy(max_predicted_wait_seconds=60.0))


def test_each_rejected_client_gets_a_later_retry_after_if_clients_retry() -> None:
    told = []
    for returns in (True, False):
        service = Service(running=1, waiting=3)
        service.admission.admit([10] * 4)
        service.work(200, seconds=1.0)
        for _ in range(300):
            assert service.refused([10]) is not None
            if returns:
                assert service.refused([10, 10, 10, 10], QueuePolicy(is_retry=True)) is not None
            service.work(130, seconds=1.0)  # no retry is expected any more
        told.append([service.seconds_refused([10]) for _ in range(4)])
    # An expected retry is served first, which adds its time. Clients that never retry add none.
    assert told[0] == pytest.approx([1.0, 1.5, 2.0, 2.5], rel=0.1)
    assert told[1] == pytest.approx([1.0] * 4, rel=0.1)


def test_tenants_whose_retries_are_past_are_forgotten() -> None:
    service = Service(running=1, waiting=3)
    service.admission.admit([10] * 4)
    for number in range(3000):
        service.clock.now += 1.0
        assert service.refused([10], QueuePolicy(tenant=f"tenant {number}")) is not None
    assert len(service.admission._retry_queues) <= 1001


def test_the_rate_of_starts_after_an_idle_moment_is_that_of_all_workers() -> None:
    """A prediction before the first ending, by a new server and after all its sequences have ended."""
    service, told = Service(running=4, waiting=100, workers=4), []
    for _ in range(2):
        service.admission.admit([10] * 17)
        for _ in range(16):
            service.clock.now += 0.1
            service.admission.started(10)
        with pytest.raises(WaitTooLong) as rejection:
            service.admission.admit([10], QueuePolicy(max_predicted_wait_seconds=0.05))
        told.append(str(rejection.value))
        service.clock.now += 600.0
        service.admission.started(10)
        for _ in range(17):
            service.admission.ended()
    assert told[1] == told[0]


def test_the_error_of_a_retry_after_is_observed_once_the_request_would_fit() -> None:
    service = Service(running=1, waiting=3)
    service.admission.admit([10] * 4)
    service.work(200, seconds=2.0)
    told = service.seconds_refused([10])
    service.clock.now += 5.0
    assert service.errors == []
    service.begin_and_end(10)
    assert service.errors == [pytest.approx(5.0 - told)]
    service.begin_and_end(10)
    assert len(service.errors) == 1


def test_retry_after_is_accurate_under_steady_load() -> None:
    """One sequence ends every half second, two arrive, and rejected clients never retry."""
    service = Service(running=4, waiting=8)
    live = 0
    for second_half in (False, True):
        service.errors.clear()
        for tick in range(2000):
            service.clock.now += 0.25
            live += service.refused([10]) is None
            if tick % 2 and live:
                service.begin_and_end(10)
                live -= 1
        assert service.errors
        if second_half:
            assert max(map(abs, service.errors)) <= 0.5


ONE, TWO, THREE = (QueuePolicy(tenant=name) for name in ("one", "two", "three"))


def fill(service: Service, *terms: QueuePolicy) -> list[int]:
    """Return how many sequences each tenant gets if all tenants flood the server at once."""
    counts = [0] * len(terms)
    while True:
        admitted = [service.refused([1], term) is None for term in terms]
        counts = [count + more for count, more in zip(counts, admitted, strict=True)]
        if not any(admitted):
            return counts


def test_a_tenant_that_floods_leaves_capacity_for_further_tenants() -> None:
    service = Service(running=20, waiting=80)
    assert fill(service, ONE) == [100]
    assert service.refused([1] * 5, TWO) is None
    assert service.refused([1], ONE) is not None
    for _ in range(5):  # the tenant must first get below its new share
        assert service.refused([1], ONE) is not None
        service.begin_and_end(1, "one")
    assert service.refused([1], ONE) is None

    assert fill(Service(running=20, waiting=80), ONE, TWO) == [56, 55]
    assert fill(Service(running=20, waiting=80), ONE, TWO, THREE) == [39, 38, 38]


def test_waiting_tokens_are_shared_among_tenants() -> None:
    service = Service(running=1000, waiting=1000, tokens=100)
    assert fill(service, ONE) == [100]
    assert service.refused([5], TWO) is None
    assert fill(Service(running=1000, waiting=1000, tokens=100), ONE, TWO) == [56, 55]


def test_the_predicted_wait_counts_a_tenants_own_queue_and_as_many_sequences_of_each_other_tenant() -> None:
    service, _ = make_busy(num_waiting=10)
    # At most one of the ten waiting sequences is served before the first sequence of another tenant.
    service.admission.admit([10], QueuePolicy(tenant="two", max_predicted_wait_seconds=2.5))
    assert service.refused([10], QueuePolicy(tenant="two", max_predicted_wait_seconds=2.5)) is not None
    service.admission.admit([10], QueuePolicy(tenant="two", max_predicted_wait_seconds=4.5))


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60), st.floats(0, 5)), max_size=40))
def test_the_bounds_hold_for_any_arrivals(arrivals: list[tuple[int, int, float]]) -> None:
    service = Service(running=2, waiting=4, tokens=100)
    live: list[int] = []
    for count, tokens, seconds in arrivals:
        service.clock.now += seconds
        while (refusal := service.refused([tokens] * count)) is not None:
            assert 0.0 < refusal.retry_after_seconds <= 120.0
            service.begin_and_end(live[0])
            del live[0]
        live += [tokens] * count
        assert service.admission.num_sequences == len(live) <= 6
        assert service.admission.num_waiting_tokens == sum(live)
        assert sum(live) <= 100 or len(live) <= 3


def test_the_first_waiting_sequence_of_a_tenant_is_bounded_by_its_timeout_only() -> None:
    service, _ = make_busy(num_waiting=10)
    for timeout_seconds, is_admitted in ((1.5, False), (2.5, True)):
        terms = QueuePolicy(tenant="two", max_predicted_wait_seconds=0.001, timeout_seconds=timeout_seconds)
        assert (service.refused([10], terms) is None) == is_admitted
    assert service.refused([10], QueuePolicy(tenant="two", max_predicted_wait_seconds=0.001)) is not None


def test_a_slot_that_is_free_for_a_moment_does_not_interrupt_the_rate() -> None:
    service = Service(running=64, waiting=20)
    service.admission.admit([1] * 64)
    for _ in range(64):
        service.admission.started(1)
    for _ in range(400):
        service.clock.now += 0.5
        service.admission.ended()
        service.admission.admit([1])
        service.clock.now += 0.5
        service.admission.started(1)
        service.admission.ended()
        service.admission.admit([1])
        service.admission.started(1)
    service.admission.admit([1])
    refusal = service.refused([1], QueuePolicy(max_predicted_wait_seconds=0.001))
    assert isinstance(refusal, WaitTooLong)
    assert "would wait about 1.0 s" in refusal.message  # two sequences ahead, two endings per second
