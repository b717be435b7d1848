"""How steps are computed: one after the other, or the next one launched before the last one's tokens are read.

`service.engine.lookahead` says when and why. A step is launched where drawing its tokens needs nothing of the host: no
mask, no rule over drawn tokens, no scores, no draft. (A nucleus of many tokens is found by asking the device how many.)
"""

from dataclasses import dataclass

import msgspec

from model.sampling import draws_alone
from service.engine.config import EngineConfig
from service.engine.decode_inputs import DecodeInputs
from service.engine.grammars import Masks
from service.engine.inputs import ModelInputs
from service.engine.plan import StepPlan, drawn_rows
from service.engine.runner import Launched, Runner, StepOutputs
from service.engine.scheduler import Scheduler
from service.engine.sequence import SequenceStatus

_NO_OUTPUTS = StepOutputs(token_ids=[], logprobs=[], prompt_logprobs={})


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step, and what it gives: computed already, or still to be read."""

    plan: StepPlan
    outputs: StepOutputs | Launched


class Steps:
    """Computes steps that the scheduler has decided, and has it decide those that are launched ahead.

    Args:
        looks_ahead: launch a step before the last one's tokens are read, wherever that can be.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, config: EngineConfig, *, looks_ahead: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._looks_ahead = looks_ahead
        self._inputs = DecodeInputs(scheduler, block_size=config.block_size, scratch_block=config.num_blocks)
        self._begun: _Begun | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun, and some sequence of it still waits for its token."""
        return self._begun is not None and bool(_live_rows(self._begun.plan))

    def begin(self, plan: StepPlan, masks: Masks | None) -> None:
        """Compute a step, or launch it. One that was launched ahead, and that nobody waits for, is forgotten."""
        self._begun = _Begun(plan, _NO_OUTPUTS)
        if plan.chunks:
            inputs = self._inputs.build(plan, min_rows=self._runner.min_rows, masks=masks)
            launches = self._looks_ahead and _needs_no_host(plan, inputs)
            self._begun = _Begun(plan, self._runner.launch(inputs) if launches else self._runner.run(inputs))

    def finish(self) -> tuple[StepPlan, StepOutputs]:
        """What the step that has begun gave, after the one behind it has been launched, where that can be.

        Returns its plan, and its outputs, without the sequences that have ended since it was launched. The scheduler
        must `commit` it next.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        plan, outputs = begun.plan, begun.outputs
        if isinstance(outputs, StepOutputs):
            return plan, outputs
        following = self._scheduler.schedule_ahead(plan)
        if following is not None:
            inputs = self._inputs.build(following, min_rows=self._runner.min_rows)
            self._begun = _Begun(following, self._runner.launch(inputs))
        return _of_the_living(plan, outputs.read())


def _needs_no_host(plan: StepPlan, inputs: ModelInputs) -> bool:
    """Whether all sequences draw, and all draws, these and those after them, can be made on the device alone."""
    return (
        all(chunk.draws and chunk.sequence.lookup is None for chunk in plan.chunks)
        and not (inputs.rules or inputs.forbidden or inputs.prompt_rows or inputs.wants_logprobs)
        and inputs.masks is None
        and all(map(draws_alone, inputs.params))
    )


def _live_rows(plan: StepPlan) -> list[int]:
    return [row for row, chunk in enumerate(plan.chunks) if chunk.sequence.status is SequenceStatus.RUNNING]


def _of_the_living(plan: StepPlan, outputs: StepOutputs) -> tuple[StepPlan, StepOutputs]:
    """A launched step, in which each chunk draws one token, without the sequences that have ended."""
    rows = _live_rows(plan)
    if len(rows) == len(plan.chunks):
        return plan, outputs
    chunks = tuple([plan.chunks[row] for row in rows])
    after_rows = tuple([plan.after_rows[row] for row in rows])
    plan = msgspec.structs.replace(plan, chunks=chunks, drawn_rows=drawn_rows(chunks), after_rows=after_rows)
    return plan, msgspec.structs.replace(outputs, token_ids=[outputs.token_ids[row] for row in rows])
