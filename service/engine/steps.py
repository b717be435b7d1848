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
from service.engine.plan import Chunk, StepPlan, drawn_rows
from service.engine.runner import Launched, Runner, StepOutputs
from service.engine.scheduler import Scheduler
from service.engine.sequence import Sequence, SequenceStatus

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

    def finish(self) -> tuple[StepPlan, StepOutputs, list[Sequence]]:
        """The outputs of the step that has begun, after the one behind it has been launched, where that can be.

        Returns its plan, its outputs, and the sequences that end here since their numbers are NaN or infinite. Plan and
        outputs are without these, and without sequences that have ended since the step was launched. The scheduler
        must `commit` the plan next.
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
        failed: list[Sequence] = []
        chunks = plan.chunks
        if outputs.non_finite:
            starts, chunks = sound_chunks(plan, outputs.non_finite)
            failed = self._scheduler.end_non_finite(plan, starts)
        return *_of_the_living(plan, outputs, chunks), failed


def sound_chunks(plan: StepPlan, non_finite: frozenset[int]) -> tuple[dict[str, int], tuple[Chunk, ...]]:
    """What packed tokens that are not finite mean for a step.

    Returns where each sequence begins of which a token is among them (uid -> position), and the chunks with their
    drafts cut before the first such token: a drafted token is not the sequence's until it is sampled.
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
    """Whether all sequences draw, and all draws, these and those after them, can be made on the device alone."""
    return (
        all(chunk.draws and chunk.sequence.lookup is None for chunk in plan.chunks)
        and not (inputs.rules or inputs.forbidden or inputs.prompt_rows or inputs.wants_logprobs)
        and inputs.masks is None
        and all(map(draws_alone, inputs.params))
    )


def _live_rows(plan: StepPlan) -> list[int]:
    return [row for row, chunk in enumerate(plan.chunks) if chunk.sequence.status is SequenceStatus.RUNNING]


def _of_the_living(plan: StepPlan, outputs: StepOutputs, chunks: tuple[Chunk, ...]) -> tuple[StepPlan, StepOutputs]:
    """A computed step without the sequences that do not run any more.

    chunks: those of the plan, some with a shorter draft.
    """
    living = _live_rows(plan)
    if len(living) == len(plan.chunks) and chunks is plan.chunks:
        return plan, outputs
    chunks = tuple([chunks[place] for place in living])
    rows = [plan.drawn_rows[place][: 1 + len(chunk.draft)] for place, chunk in zip(living, chunks, strict=True)]
    order = [each[0] for each in rows if each] + [row for each in rows for row in each[1:]]
    uids = {chunk.sequence.uid for chunk in chunks}
    return msgspec.structs.replace(
        plan,
        chunks=chunks,
        drawn_rows=drawn_rows(chunks),
        after_rows=tuple([plan.after_rows[place] for place in living]) if plan.after_rows else (),
    ), StepOutputs(
        token_ids=[outputs.token_ids[row] for row in order],
        logprobs=[outputs.logprobs[row] for row in order] if outputs.logprobs else [],
        prompt_logprobs={uid: entries for uid, entries in outputs.prompt_logprobs.items() if uid in uids},
        pooled={uid: sum_E for uid, sum_E in outputs.pooled.items() if uid in uids},
    )
