"""Prefill budget: number of prompt tokens in steps with decodes, on a simulated machine."""

import math
import sys
from dataclasses import dataclass, field

import pytest

from service.engine.scheduling.scheduler import EngineConfig, Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import FinishReason
from tests.engine.fakes import make_submit

# Step times of this machine, in seconds.
FIXED, PER_ROW, PER_PROMPT_TOKEN = 0.016, 0.001, 0.0004


@dataclass
class Machine:
    """Scheduler on a simulated machine. `steps` holds, for each step, the number of computed tokens by uid."""

    slowdown: float
    budget: int = 512
    now: float = 0.0
    num_arrived: int = 0
    steps: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = EngineConfig(
            num_blocks=1000, max_num_running=8, max_batched_tokens=self.budget, prompt_slowdown=self.slowdown
        )
        self.scheduler = Scheduler(config, max_context_length=4000, clock=lambda: self.now)

    def arrive(self, uid: str, num_tokens: int) -> None:
        self.num_arrived += 1
        submit = make_submit(uid, [self.num_arrived, *range(num_tokens - 1)], max_tokens=500, ignore_eos=True)
        self.scheduler.add(SequenceState(submit, arrival_number=self.num_arrived, max_context_length=4000))

    def step(self) -> float:
        """Run a step on the simulated machine. Return the step's duration in seconds."""
        plan = self.scheduler.schedule()
        rows = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
        took = FIXED + PER_ROW * rows + PER_PROMPT_TOKEN * (plan.num_tokens - rows)
        self.now += took
        self.scheduler.commit(plan, [7 for chunk in plan.chunks if chunk.samples])
        self.steps.append({chunk.uid: chunk.num_tokens for chunk in plan.chunks})
        return took

    def decode(self, num_sequences: int) -> float:
        """Add `num_sequences` sequences and run 30 steps. Return the duration of the last step in seconds."""
        for number in range(num_sequences):
            self.arrive(f"d{number}", 4)
        return [self.step() for _ in range(30)][-1]


@pytest.mark.parametrize("num_sequences", [1, 4])
@pytest.mark.parametrize("slowdown", [1.5, 2.0, 4.0])
def test_a_long_prompt_slows_decodes_by_at_most_the_factor(num_sequences: int, slowdown: float) -> None:
    machine = Machine(slowdown)
    alone = machine.decode(num_sequences)
    machine.arrive("long", 3400)
    took = [machine.step() for _ in range(20)]
    assert all("long" in step for step in machine.steps[-20:])
    assert max(took[10:]) <= 1.1 * slowdown * alone
    assert min(took[10:]) >= 0.9 * slowdown * alone


def test_with_an_infinite_slowdown_a_prefill_takes_the_whole_budget() -> None:
    machine = Machine(math.inf)
    machine.decode(4)
    machine.arrive("long", 2000)
    machine.step()
    assert machine.steps[-1]["long"] == 512 - 4


def test_prefills_without_decodes_have_no_bound() -> None:
    machine = Machine(2.0)
    machine.decode(1)
    (sequence,) = machine.scheduler.sequences()
    machine.scheduler.finish(sequence, FinishReason.ABORT)
    machine.arrive("long", 2000)
    machine.step()
    assert machine.steps[-1] == {"long": 512}


def test_waiting_prompts_share_a_step_within_its_token_budget() -> None:
    machine = Machine(2.0, budget=60)
    machine.decode(4)
    for uid in ("x", "y", "z"):
        machine.arrive(uid, 1000)
    for _ in range(5):
        machine.step()
    prompts = [{uid: n for uid, n in step.items() if uid in "xyz"} for step in machine.steps[-4:]]
    assert all(len(step) > 1 for step in prompts)
    assert all(sum(step.values()) == 56 for step in prompts)


def test_a_prefill_advances_in_every_step_at_the_smallest_slowdown() -> None:
    machine = Machine(1.0)
    machine.decode(1)
    machine.arrive("long", 100)
    for _ in range(13):
        machine.step()
    assert sum(step.get("long", 0) for step in machine.steps) >= 100


def test_one_stalled_step_changes_the_prefill_bound_little() -> None:
    machine, other = Machine(2.0), Machine(2.0)
    for each in (machine, other):
        each.decode(4)
        each.arrive("long", 2000)
        for _ in range(20):
            each.step()
        usual = each.steps[-1]["long"]
        if each is machine:
            plan = each.scheduler.schedule()
            each.now += 100.0  # the machine was busy
            each.scheduler.commit(plan, [7 for chunk in plan.chunks if chunk.samples])
        each.step()
        assert usual / 2 <= each.steps[-1]["long"] <= usual
    assert machine.steps[-1]["long"] < other.steps[-1]["long"]


def test_prefills_have_no_bound_before_the_first_decode_step() -> None:
    machine = Machine(2.0)
    machine.arrive("a", 600)
    machine.step()
    assert machine.scheduler._prefill_budget.max_allowed_tokens(3) == sys.maxsize
