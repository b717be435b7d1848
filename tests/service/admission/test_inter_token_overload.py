"""Admission in front of the scheduler at four times the load that meets the inter-token target, in virtual time."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from service.admission.controller import QueuePolicy
from service.protocol.errors import Overloaded
from tests.engine.simulated_steps import SimulatedSteps
from tests.service.doorman import Service

TARGET_TPOT, TARGET_TTFT = 0.05, 0.5
# Four times the load that the machine serves within the targets.
REQUESTS_PER_SECOND = 40.0
TERMS = QueuePolicy(tenant="flood", max_predicted_wait_seconds=0.05)


@dataclass
class Overload:
    """Simulated server under overload: requests arrive as a Poisson process at admission and the scheduler."""

    machine: SimulatedSteps
    retry_after: list[float] = field(default_factory=list)  # seconds, of each rejected request
    next_arrival: float = 0.0

    def __post_init__(self) -> None:
        self.service = Service(running=self.machine.max_num_running, waiting=256, tokens=10**9)

    def arrive(self, seconds: float) -> None:
        self.service.clock.now = seconds
        try:
            self.service.admission.admit([1], TERMS)
        except Overloaded as refusal:
            self.retry_after.append(refusal.retry_after_seconds)
            return
        self.machine.arrive(seconds)

    def step(self) -> None:
        machine, admission = self.machine, self.service.admission
        if not machine.scheduler.has_work:
            machine.now = max(machine.now, self.next_arrival)
        began = machine.now
        self._arrive_until(began)
        step = machine.step()
        self._arrive_until(machine.now)
        self.service.clock.now = machine.now
        for _ in step.began:
            admission.started(1, TERMS.tenant)
        for _ in step.ended:
            admission.ended(TERMS.tenant)
        admission.limit_running(machine.scheduler.max_num_running)

    def _arrive_until(self, seconds: float) -> None:
        while self.next_arrival <= seconds:
            self.arrive(max(self.next_arrival, self.service.clock.now))
            self.next_arrival += self.machine.draw.expovariate(REQUESTS_PER_SECOND)

    def run(self, num_steps: int) -> None:
        """Measure `num_steps` steps after 800 warm-up steps, since the first burst of requests is admitted at once."""
        for _ in range(800):
            self.step()
        self.machine.ended, self.retry_after, self.service.errors[:] = [], [], []
        for _ in range(num_steps):
            self.step()

    def ttft_seconds(self, percentile: float) -> float:
        return float(np.percentile([answer.ttft_seconds for answer in self.machine.ended], percentile))

    @property
    def goodput(self) -> float:
        """Share of the ended sequences that met both the TTFT and the TPOT target."""
        ended = self.machine.ended
        return sum(a.tpot_seconds <= TARGET_TPOT and a.ttft_seconds <= TARGET_TTFT for a in ended) / len(ended)


def test_without_an_inter_token_target_ttft_is_low_and_no_sequence_meets_the_target() -> None:
    overload = Overload(SimulatedSteps())
    overload.run(1000)
    assert overload.ttft_seconds(99) <= TARGET_TTFT
    assert overload.goodput == 0.0


@pytest.mark.parametrize(("noise", "goodput"), [(0.0, 0.99), (0.3, 0.9)])
def test_with_an_inter_token_target_admitted_sequences_meet_the_target_and_further_requests_are_rejected(
    noise: float, goodput: float
) -> None:
    overload = Overload(SimulatedSteps(target_seconds=TARGET_TPOT, noise=noise))
    overload.run(2000)
    assert overload.goodput >= goodput
    assert overload.ttft_seconds(99) <= TARGET_TTFT
    assert overload.machine.scheduler.num_waiting <= 5
    # At least three quarters of the Retry-After values are right within half a second.
    assert overload.retry_after
    assert float(np.percentile(np.abs(overload.service.errors), 75)) <= 0.5


def test_ttft_stays_low_on_a_machine_that_slows_down_and_recovers_under_overload() -> None:
    overload = Overload(SimulatedSteps(target_seconds=TARGET_TPOT))
    overload.run(400)
    overload.machine.slowdown = 1.5
    overload.run(800)
    assert overload.goodput >= 0.95
    assert overload.ttft_seconds(99) <= TARGET_TTFT
    overload.machine.slowdown = 1.0
    overload.run(400)
    assert overload.goodput >= 0.95
    assert overload.machine.scheduler.num_running >= 20
