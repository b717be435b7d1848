"""Execution of steps: one after the other, or the next step launched before the previous step's tokens are read.

`service.engine.scheduling.lookahead` describes the reason and the conditions. A step is launched ahead only if sampling
needs nothing of the host: no grammar mask, token rules, logprobs or drafts. (Nor top-p sampling without a small top-k,
where the host asks the device for the number of candidates.)
"""

from dataclasses import dataclass

import msgspec

from model.sampling.sampler import can_sample_without_host
from service.engine.execution.decode_inputs import DecodeInputs
from service.engine.execution.grammar_masks import Masks
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import Launched, Runner, StepOutputs
from service.engine.scheduling.config import EngineConfig
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.sequence import SequenceState, SequenceStatus
from service.engine.scheduling.step_plan import Chunk, StepPlan, sampled_rows

_NO_OUTPUTS = StepOutputs(token_ids=[], logprobs=[], prompt_logprobs={})


@dataclass(frozen=True, slots=True)
class _Begun:
    """Step with its outputs, computed already or still on the device."""

    plan: StepPlan
    outputs: StepOutputs | Launched


class StepExecutor:
    """Executor of planned steps. It asks the scheduler for the plans of steps launched ahead.

    Args:
        runner: computes the steps.
        scheduler: plans the steps launched ahead.
        config: sizes of the KV-cache.
        looks_ahead: launch a step before the previous step's tokens are read, if possible.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, config: EngineConfig, *, looks_ahead: bool) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._looks_ahead = looks_ahead
        self._inputs = DecodeInputs(scheduler, block_size=config.block_size, scratch_block=config.num_blocks)
        self._begun: _Begun | None = None

    @property
    def is_under_way(self) -> bool:
        """True if a step has begun and some sequence of it is still running."""
        return self._begun is not None and bool(_running_rows(self._begun.plan))

    def begin(self, plan: StepPlan, masks: Masks | None) -> None:
        """Compute or launch a step. A step launched ahead whose sequences have all ended is dropped."""
        self._begun = _Begun(plan, _NO_OUTPUTS)
        if plan.chunks:
            inputs = self._inputs.build(plan, min_rows=self._runner.min_rows, masks=masks)
            launches = self._looks_ahead and _needs_no_host(plan, inputs)
            self._begun = _Begun(plan, self._runner.launch(inputs) if launches else self._runner.run(inputs))

    def finish(self) -> tuple[StepPlan, StepOutputs, list[SequenceState]]:
        """Finish the step that has begun, after launching the next step if possible.

        Return the plan, its outputs, and the sequences ended because their numbers are NaN or infinite. The plan and
        the outputs omit these sequences, and sequences that ended since the launch. A `commit` of the plan must follow.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        plan, outputs = begun.plan, begun.outputs
        if not isinstance(outputs, StepOutputs):
            following = self._scheduler.schedule_ahead(plan)
            if following is not None:
                inputs = self._inputs.build(following, min_rows=self._runner.min_rows)
                self._begun = _Begun(following, self._runner.launch(inputs))
            outputs = outputs.read()
        failed: list[SequenceState] = []
        chunks = plan.chunks
        if outputs.non_finite:
            starts, chunks = split_non_finite(plan, outputs.non_finite)
            failed = self._scheduler.end_non_finite(plan, starts)
        return *_without_ended(plan, outputs, chunks), failed


def split_non_finite(plan: StepPlan, non_finite: frozenset[int]) -> tuple[dict[str, int], tuple[Chunk, ...]]:
    """Separate a step's sequences with non-finite numbers, and cut drafts before their first non-finite token.

    A non-finite draft token only shortens the draft, because a draft token joins the sequence only when it is sampled.

    Returns:
        The start position of each chunk with a non-finite known token, by uid, and the chunks with drafts cut.
    """
    starts: dict[str, int] = {}
    chunks: list[Chunk] = []
    row = 0
    for chunk in plan.chunks:
        end, end_row = row + chunk.num_tokens - len(chunk.draft), row + chunk.num_tokens
        if not non_finite.isdisjoint(range(row, end)):
            starts[chunk.sequence.uid] = chunk.start
        sound = next((at for at in range(end, end_row) if at in non_finite), end_row) - end
        if sound < len(chunk.draft):
            cut = len(chunk.draft) - sound
            chunk = msgspec.structs.replace(chunk, num_tokens=chunk.num_tokens - cut, draft=chunk.draft[:sound])
        chunks.append(chunk)
        row = end_row
    return starts, tuple(chunks)


def _needs_no_host(plan: StepPlan, inputs: ModelInputs) -> bool:
    """Return True if all sequences sample a token, and the device can sample this and later tokens without the host."""
    return (
        all(chunk.draws and chunk.sequence.lookup is None for chunk in plan.chunks)
        and not (inputs.rules or inputs.forbidden or inputs.prompt_rows or inputs.wants_logprobs)
        and inputs.masks is None
        and all(map(can_sample_without_host, inputs.params))
    )


def _running_rows(plan: StepPlan) -> list[int]:
    return [row for row, chunk in enumerate(plan.chunks) if chunk.sequence.status is SequenceStatus.RUNNING]


def _without_ended(plan: StepPlan, outputs: StepOutputs, chunks: tuple[Chunk, ...]) -> tuple[StepPlan, StepOutputs]:
    """Return a computed step without the sequences that are no longer running.

    chunks: the chunks of the plan, possibly with shorter drafts.
    """
    running = _running_rows(plan)
    if len(running) == len(plan.chunks) and chunks is plan.chunks:
        return plan, outputs
    chunks = tuple([chunks[place] for place in running])
    rows = [plan.sampled_rows[place][: 1 + len(chunk.draft)] for place, chunk in zip(running, chunks, strict=True)]
    order = [each[0] for each in rows if each] + [row for each in rows for row in each[1:]]
    uids = {chunk.sequence.uid for chunk in chunks}
    return msgspec.structs.replace(
        plan,
        chunks=chunks,
        sampled_rows=sampled_rows(chunks),
        previous_rows=tuple([plan.previous_rows[place] for place in running]) if plan.previous_rows else (),
    ), StepOutputs(
        token_ids=[outputs.token_ids[row] for row in order],
        logprobs=[outputs.logprobs[row] for row in order] if outputs.logprobs else [],
        prompt_logprobs={uid: entries for uid, entries in outputs.prompt_logprobs.items() if uid in uids},
        pooled={uid: sum_E for uid, sum_E in outputs.pooled.items() if uid in uids},
    )
