"""Execution of planned steps: build inputs, run, or launch the next step before the previous step's tokens are read.

A step is launched only if sampling needs nothing of the host: no grammar mask, token rules, logprobs or drafts. (Nor
top-p sampling without a small top-k, where the host asks the device for the number of candidates.)
"""

from collections.abc import Callable

from model.sampling.sampler import can_sample_without_host
from service.engine.execution.grammar_masks import Masks
from service.engine.execution.model_inputs import InputBuilder, ModelInputs
from service.engine.execution.model_runner import ModelRunner, StepOutputs
from service.engine.scheduling.step_plan import StepPlan

_NO_OUTPUTS = StepOutputs(token_ids=[], logprobs=[], prompt_logprobs={})


class StepExecutor:
    """Executor of planned steps, at most one under way and one launched ahead.

    Args:
        runner: computes the steps.
        block_size: tokens per KV block.
        scratch_block: KV block that belongs to no sequence, for padding.
        looks_ahead: launch steps instead of running them, if possible.
    """

    def __init__(self, runner: ModelRunner, *, block_size: int, scratch_block: int, looks_ahead: bool) -> None:
        self._runner = runner
        self._looks_ahead = looks_ahead
        self._inputs = InputBuilder(block_size=block_size, scratch_block=scratch_block)
        self._plan: StepPlan | None = None
        self._outputs: StepOutputs | Callable[[], StepOutputs] = _NO_OUTPUTS

    @property
    def plan(self) -> StepPlan | None:
        """Plan of the step that was started or launched ahead, and is not finished."""
        return self._plan

    @property
    def is_launched(self) -> bool:
        """True if the unfinished step is launched, so that another step may be launched ahead."""
        return callable(self._outputs)

    def start(self, plan: StepPlan, masks: Masks | None) -> None:
        """Compute or launch a step. An unfinished step is dropped."""
        self._plan, self._outputs = plan, _NO_OUTPUTS
        if plan.chunks:
            inputs = self._inputs.build(plan, min_rows=self._runner.min_rows, masks=masks)
            launches = self._looks_ahead and _needs_no_host(plan, inputs)
            self._outputs = self._runner.launch(inputs) if launches else self._runner.run(inputs)

    def finish(self, ahead: StepPlan | None) -> StepOutputs:
        """Launch the step `ahead`, if any, then wait for the unfinished step and return its outputs."""
        outputs = self._outputs
        self._plan, self._outputs = ahead, _NO_OUTPUTS
        if ahead is not None:
            self._outputs = self._runner.launch(self._inputs.build(ahead, min_rows=self._runner.min_rows))
        return outputs() if callable(outputs) else outputs


def _needs_no_host(plan: StepPlan, inputs: ModelInputs) -> bool:
    """Return True if all sequences sample a token, and the device can sample this and later tokens without the host."""
    return (
        all(chunk.samples for chunk in plan.chunks)
        and not (inputs.rules or inputs.forbidden or inputs.prompt_rows or inputs.wants_logprobs)
        and inputs.masks is None
        and all(map(can_sample_without_host, inputs.params))
    )
