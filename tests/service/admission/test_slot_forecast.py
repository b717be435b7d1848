"""When answers will have ended: by their length, and before."""

from dataclasses import dataclass

import pytest

from service.admission.slot_forecast import SlotForecast


@dataclass(eq=False)
class Left:
    """An answer that may get so many tokens."""

    num_remaining_tokens: int


class Hall:
    """Places, and steps of so many seconds."""

    def __init__(self, *lengths: int, seconds: float = 0.1) -> None:
        self.forecast = SlotForecast()
        self.seconds = seconds
        self.answers = [Left(length) for length in lengths]
        for answer in self.answers:
            self.forecast.take(answer)

    def step(self, num: int) -> None:
        for _ in range(num):
            self.forecast.pass_time(self.seconds)
            for answer in self.answers:
                answer.num_remaining_tokens -= 1
            self.forecast.step(1)

    def seconds_until_ended(self, count: float) -> float:
        return self.forecast.seconds_until_ended(count)


def test_answers_end_in_order_of_what_they_have_left_at_the_pace_of_late() -> None:
    for seconds in (0.1, 0.5):
        hall = Hall(1300, 1010, 1020, 1400, seconds=seconds)
        hall.step(1000)
        assert hall.forecast.num_seen == 2
        assert hall.seconds_until_ended(0) == 0.0
        assert hall.seconds_until_ended(1) == pytest.approx(10 * seconds, rel=0.05)
        assert hall.seconds_until_ended(2) == pytest.approx(20 * seconds, rel=0.05)
        hall.step(5)
        assert hall.seconds_until_ended(1) == pytest.approx(5 * seconds, rel=0.05)


def test_the_present_step_is_under_way_and_no_more_than_that() -> None:
    hall = Hall(1003, 2000, seconds=1.0)
    hall.step(1000)
    hall.forecast.pass_time(0.5)
    assert hall.seconds_until_ended(1) == pytest.approx(2.5, rel=0.01)
    hall.forecast.pass_time(100.0)  # whatever holds it up
    assert hall.seconds_until_ended(1) == pytest.approx(2.0, rel=0.01)


def test_who_ends_early_leaves_a_place_and_does_so_as_often_as_of_late() -> None:
    hall = Hall(*[10_000] * 10, seconds=1.0)
    hall.step(200)
    assert hall.seconds_until_ended(1) > 25.0  # as if one had ended early in all that is remembered
    for _ in range(200):
        hall.step(1)
        hall.forecast.leave(hall.answers.pop())
        hall.answers.append(Left(10_000))
        hall.forecast.take(hall.answers[-1])
    assert hall.seconds_until_ended(1) == pytest.approx(1.0, rel=0.05)
    assert hall.seconds_until_ended(3) == pytest.approx(3.0, rel=0.05)
    hall.answers[0].num_remaining_tokens = 1
    hall.forecast.step(1)
    assert hall.seconds_until_ended(3) == pytest.approx(2.0, rel=0.1)  # of the others two


def test_who_comes_to_its_length_or_never_began_is_not_counted_as_early() -> None:
    seconds = []
    for num_left in (0, 1):
        hall = Hall(*[10_000] * 10, seconds=1.0)
        for _ in range(100):
            hall.step(1)
            ending = Left(num_left)
            hall.forecast.take(ending)
            hall.forecast.leave(ending)
            hall.forecast.leave(Left(5))
        seconds.append(hall.seconds_until_ended(1))
    assert seconds[0] > 10.0 * seconds[1]


def test_nothing_is_foreseen_without_a_pace() -> None:
    hall = Hall(100, 100)
    assert hall.forecast.num_seen == 0
    hall.step(16)
    assert hall.forecast.num_seen == 1
    assert hall.forecast.seconds_for_tokens(3) == pytest.approx(0.3)
    assert Hall().forecast.num_seen == 0


def test_the_pace_follows_the_service() -> None:
    hall = Hall(100_000, 100_000)
    hall.step(1000)
    hall.seconds = 0.4
    hall.step(500)
    assert hall.forecast.seconds_for_tokens(1) == pytest.approx(0.4, rel=0.05)
