"""The wait that is predicted from what answers have left."""

from dataclasses import dataclass

import pytest

from service.admission.queue_policy import QueuePolicy
from service.protocol.errors import Overloaded, WaitTooLong
from tests.service.desk import Desk
from tests.service.doorman import Clock, Service
from tests.service.sequences import make_choice, make_delta, make_finish


@dataclass(eq=False)
class Left:
    """An answer that may get so many tokens."""

    num_remaining_tokens: int


class Steady(Service):
    """A server whose places are all taken by answers of those lengths, after a hundred steps of a second. At each of
    them another answer has ended, and the next begun. So many wait."""

    def __init__(self, *lengths: int, num_waiting: int = 1) -> None:
        super().__init__(running=len(lengths), waiting=100)
        self.answers = [Left(length + 100) for length in lengths]
        for answer in self.answers:
            self.admission.admit([1])
            self.admission.started(1, answer=answer)
        for _ in range(100):
            self.clock.now += 1.0
            for answer in self.answers:
                answer.num_remaining_tokens -= 1
            self.admission.ended()
            self.admission.admit([1])
            self.admission.started(1)
            self.admission.stepped([1] * len(lengths))
        for _ in range(num_waiting):
            self.admission.admit([1])

    @property
    def predicted_seconds(self) -> float:
        """What a request would wait."""
        refusal = self.refused([1], QueuePolicy(patience_seconds=0.001))
        assert isinstance(refusal, WaitTooLong)
        return float(refusal.message.split("about ")[1].split(" s,")[0])


def test_the_next_places_are_foreseen_by_what_answers_have_left() -> None:
    for first, second in ((3, 8), (10, 12)):
        service = Steady(first, second, 50, 50)
        assert service.predicted_seconds == pytest.approx(second, rel=0.05)  # behind one that waits
        service.admission.admit([1], QueuePolicy(patience_seconds=second + 1.0))
        # Half of the answers are foreseen, and one more by the rate: one a second.
        assert service.predicted_seconds == pytest.approx(second + 1.0, rel=0.05)


def test_a_step_that_tells_of_no_token_is_none() -> None:
    service = Steady(10, 20, 50, 50)
    before = service.predicted_seconds
    for _ in range(50):
        service.admission.stepped([0, 0])
        service.admission.stepped([])
    assert service.predicted_seconds == before
    for _ in range(50):  # many more in the same time
        service.admission.stepped([1, 1, 0])
    assert service.predicted_seconds < 0.8 * before


def test_who_has_a_place_and_waits_for_its_first_token_begins_at_the_rate_of_late() -> None:
    """Where prompts take the time: six of ten have ended, and who waits has their places."""
    service = Steady(*[0] * 6, 2, 2, 1000, 1000)
    for answer in service.answers[:6]:
        service.admission.ended(answer=answer)
    assert service.refused([1] * 5) is None
    # The next would be the seventh to begin, one a second. The place it needs is free in two; two steps are usual.
    assert service.predicted_seconds == pytest.approx(6.0 - 2.0, rel=0.1)


def test_what_is_hopeless_now_and_not_a_moment_later_takes_no_room() -> None:
    class Running(Clock):
        def __call__(self) -> float:
            self.now += 0.01
            return self.now

    for patience in (4.2, 4.4, 4.6, 4.8):
        service = Steady(2, 5, 50, 50)
        service.admission._clock = clock = Running()
        clock.now = service.clock.now
        before, refused = service.admission.num_sequences, []
        for _ in range(100):
            try:
                service.admission.reject_by_headers(QueuePolicy(patience_seconds=patience))
                refused.append(False)
            except Overloaded:
                refused.append(True)
        assert service.admission.num_sequences == before
        assert refused == sorted(refused, reverse=True)
        assert set(refused) == {True, False}


def test_the_journal_tells_of_every_token_and_every_ending() -> None:
    desk = Desk()
    for uid, max_tokens in (("a", 100), ("b", 40)):
        desk.open(make_choice(uid, max_tokens=max_tokens))
    places = desk.admission._forecast
    for index in range(20):
        assert places.num_seen == (1 if index >= 16 else 0)
        desk.engine_client.receive([make_delta(uid, index=index, ids=(1,)) for uid in ("a", "b")])
    for index, ids in ((20, (1,)), (21, (1, 2)), (23, (1,))):
        num_left = 40 - index
        left = places.seconds_until_ended(1) / places.seconds_for_tokens(1)  # a quotient of floats, rounded
        assert num_left - 1.000001 <= left <= num_left + 0.000001
        desk.engine_client.receive([make_delta("b", index=index, ids=ids)])
    desk.engine_client.receive([make_delta("b", index=24, finish=make_finish())])
    desk.engine_client.receive([make_delta("a", index=20, finish=make_finish())])
    assert places.num_seen == 0


def test_first_endings_free_no_slot_where_more_run_than_the_limit() -> None:
    service = Steady(3, 8, 10, 50, 50, 50, 50, 50, num_waiting=0)
    assert service.predicted_seconds == pytest.approx(3.0, rel=0.05)
    service.admission.limit_running(6)
    assert service.predicted_seconds == pytest.approx(10.0, rel=0.05)
    service.admission.limit_running(4)  # four endings of eight are foreseen, later ones go by the rate: one a second
    five_endings = service.predicted_seconds
    service.admission.limit_running(2)
    assert service.predicted_seconds == pytest.approx(five_endings + 2.0, abs=0.1)
    service.admission.limit_running(None)
    assert service.predicted_seconds == pytest.approx(3.0, rel=0.05)


def test_a_limit_above_the_configured_one_changes_nothing() -> None:
    service = Steady(3, 8, 10, 50)
    service.admission.limit_running(400)
    assert service.predicted_seconds == pytest.approx(8.0, rel=0.05)


def test_whose_the_places_are_waits_no_longer_than_others_of_its_requests() -> None:
    """Two owners: one has three of four places, none of either waits."""
    terms = {name: QueuePolicy(tenant=name, patience_seconds=0.5) for name in ("many", "one", "new")}
    service = Service(running=4, waiting=100)
    answers = [Left(1000) for _ in range(4)]
    for tenant, answer in zip(("many", "many", "many", "one"), answers, strict=True):
        service.admission.admit([1], terms[tenant])
        service.admission.started(1, tenant, answer)
    for _ in range(20):
        service.clock.now += 1.0
        service.admission.admit([1], QueuePolicy(tenant="many"))
        service.admission.started(1, "many")
        service.admission.ended("many")
        service.admission.stepped([1] * 4)
    assert isinstance(service.refused([1], terms["many"]), WaitTooLong)
    assert service.refused([1], terms["one"]) is None  # has half of an even share
    assert isinstance(service.refused([1], terms["one"]), WaitTooLong)  # and now one that waits
    assert service.refused([1], terms["new"]) is None
