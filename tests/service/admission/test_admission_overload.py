"""Admission in front of a simulated engine at four times saturation, in virtual time."""

import math
import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from service.admission.controller import QueuePolicy
from service.protocol.errors import Overloaded
from tests.service.doorman import Service

NUM_SLOTS = 32
MEAN_TOKENS = 60
STEP_SECONDS, PROMPT_SECONDS = 0.08, 0.02
TERMS = QueuePolicy(tenant="flood", max_predicted_wait_seconds=0.05)


@dataclass(eq=False)
class Sequence:
    """Admitted sequence of the simulation; `num_tokens` is the number of tokens that it still generates."""

    arrival_seconds: float
    num_tokens: int


class Engine:
    """Simulated engine: a step computes one token per running sequence, and is longer for each new prompt."""

    def __init__(self, *, exponential: bool, closed: bool) -> None:
        self.service = Service(running=NUM_SLOTS, waiting=256, tokens=10**9)
        self.draw = random.Random(1)
        self.exponential = exponential
        self.closed = closed
        rate = NUM_SLOTS / MEAN_TOKENS / STEP_SECONDS
        self.gap_seconds = 1.0 / (4.0 * rate)
        self.next_arrival = 0.0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.first_seconds: list[float] = []  # from arrival to the first token
        self.num_tokens = self.num_over = 0

    def arrive(self, seconds: float) -> None:
        """Submit a request whose length is exponentially or log-normally distributed."""
        if self.exponential:
            num_tokens = 1 + int(self.draw.expovariate(1.0 / MEAN_TOKENS))
        else:
            num_tokens = 1 + int(self.draw.lognormvariate(math.log(MEAN_TOKENS * 0.83), 0.6))
        self.service.clock.now = seconds
        try:
            self.service.admission.admit([1], TERMS)
        except Overloaded:
            return
        self.waiting.append(Sequence(seconds, num_tokens))

    def step(self) -> None:
        """Simulate a step. Requests arrive during the step, at random times, or if `closed` one per ended sequence."""
        begun = [self.waiting.popleft() for _ in range(min(len(self.waiting), NUM_SLOTS - len(self.running)))]
        began = self.service.clock.now
        ended = began + STEP_SECONDS + PROMPT_SECONDS * len(begun)
        for _ in range(self.num_over if self.closed else 0):
            self.arrive(began + 0.001)
        while not self.closed and self.next_arrival < ended:
            self.arrive(max(began, self.next_arrival))
            self.next_arrival += self.draw.expovariate(1.0 / self.gap_seconds)
        self.service.clock.now = ended
        admission = self.service.admission
        for sequence in begun:
            self.first_seconds.append(ended - sequence.arrival_seconds)
            admission.started(1, TERMS.tenant)
        self.running += begun
        for sequence in self.running:
            sequence.num_tokens -= 1
        over = [sequence for sequence in self.running if not sequence.num_tokens]
        for sequence in over:
            self.running.remove(sequence)
            admission.ended(TERMS.tenant)
        self.num_tokens += len(self.running) + len(over)
        self.num_over = len(over)

    def run(self, num_steps: int) -> tuple[float, float]:
        """Return tokens per second and the 99th percentile of TTFT in seconds.

        The first 1,000 steps are not measured, because the first burst of requests is admitted at once.
        """
        for _ in range(NUM_SLOTS if self.closed else 0):
            self.arrive(0.0)
        for _ in range(1000):
            self.step()
        began, self.num_tokens, self.first_seconds = self.service.clock.now, 0, []
        for _ in range(num_steps):
            self.step()
        rate = self.num_tokens / (self.service.clock.now - began)
        return rate, float(np.percentile(self.first_seconds, 99))


@pytest.mark.parametrize("exponential", [False, True])
def test_slots_stay_full_and_ttft_stays_low_at_four_times_saturation(exponential: bool) -> None:
    rate, calm = Engine(exponential=exponential, closed=True).run(2000)
    overload_rate, overload = Engine(exponential=exponential, closed=False).run(2000)
    assert overload_rate >= 0.95 * rate
    assert overload <= 2.0 * calm
