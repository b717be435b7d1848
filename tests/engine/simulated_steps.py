"""Scheduler on a simulated machine: a step's duration is linear in its decodes and prompt tokens."""

import math
import random
from dataclasses import dataclass, field

from service.engine.scheduling.scheduler import EngineConfig, Scheduler
from service.engine.scheduling.sequence import SequenceState
from tests.engine.fakes import make_submit

MEAN_TOKENS = 60


@dataclass(eq=False)
class Answer:
    """Sequence with the times of its arrival, its first token and its last token."""

    sequence: SequenceState
    arrival_seconds: float
    first_seconds: float = math.inf
    last_seconds: float = math.inf

    @property
    def ttft_seconds(self) -> float:
        return self.first_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> float:
        return (self.last_seconds - self.first_seconds) / (self.sequence.num_completion_tokens - 1)


@dataclass(frozen=True)
class Step:
    """Simulated step: its duration, and the sequences that it gave a token, their first token, or their last token."""

    seconds: float
    served: list[Answer]
    began: list[Answer]
    ended: list[Answer]


@dataclass
class SimulatedSteps:
    """Scheduler on a simulated machine, with the machine's seconds per step, decode and prompt token.

    noise: standard deviation of the logarithm of a step's duration. slowdown: factor on each duration.
    """

    fixed: float = 0.016
    per_sequence: float = 0.001
    per_prompt_token: float = 0.0002
    noise: float = 0.0
    target_seconds: float = math.inf
    max_num_running: int = 64
    now: float = 0.0
    slowdown: float = 1.0
    ended: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(
            num_blocks=4000,
            max_num_running=self.max_num_running,
            prompt_slowdown=1.75,
            enable_prefix_cache=False,
            target_itl_seconds=self.target_seconds,
        )
        self.scheduler = Scheduler(config, max_context_length=4000, clock=lambda: self.now)
        self.draw = random.Random(1)
        self.answers: dict[str, Answer] = {}
        self.num_arrived = 0

    def arrive(self, at_seconds: float | None = None) -> Answer:
        """Submit a prompt of 64 tokens with a completion of random length, on average about `MEAN_TOKENS` tokens."""
        self.num_arrived += 1
        num_tokens = 2 + int(self.draw.lognormvariate(math.log(MEAN_TOKENS * 0.83), 0.6))
        submit = make_submit(f"s{self.num_arrived}", [7] * 64, max_tokens=num_tokens, ignore_eos=True)
        sequence = SequenceState(submit, arrival_number=self.num_arrived, max_context_length=4000)
        self.scheduler.add(sequence)
        answer = Answer(sequence, self.now if at_seconds is None else at_seconds)
        self.answers[sequence.uid] = answer
        return answer

    def step(self) -> Step:
        plan = self.scheduler.schedule()
        num_decodes = sum(chunk.samples and chunk.num_tokens == 1 for chunk in plan.chunks)
        num_prompt_tokens = plan.num_tokens - num_decodes
        seconds = self.fixed + self.per_sequence * num_decodes + self.per_prompt_token * num_prompt_tokens
        seconds *= self.slowdown * math.exp(self.draw.gauss(0.0, self.noise) - self.noise**2 / 2)
        self.now += seconds
        served = [self.answers[chunk.uid] for chunk in plan.chunks if chunk.samples]
        updates = self.scheduler.commit(plan, [7] * len(served))
        began = [answer for answer in served if math.isinf(answer.first_seconds)]
        for answer in began:
            answer.first_seconds = self.now
        over = [self.answers.pop(update.sequence.uid) for update in updates if update.sequence.finish_reason]
        for answer in over:
            answer.last_seconds = self.now
        self.ended += over
        return Step(seconds, served, began, over)

    def run_full(self, num_steps: int) -> float:
        """Run steps with at least eight sequences waiting. Return tokens per second; `ended` gets ended sequences."""
        began, num_tokens, self.ended = self.now, 0, []
        for _ in range(num_steps):
            while self.scheduler.num_waiting < 8:
                self.arrive()
            num_tokens += len(self.step().served)
        return num_tokens / (self.now - began)

    def share_within(self, seconds: float) -> float:
        """Return the share of ended sequences whose mean time between tokens was at most `seconds`."""
        return sum(answer.tpot_seconds <= seconds for answer in self.ended) / len(self.ended)
