"""Overlap scheduling: plan the next step before the tokens of the current step are known. Pure Python.

A GPU idles while the host reads a step's tokens, commits and reports them, plans the next step and builds its tensors.
A step of decodes needs only the sampled tokens of the previous step, and they are already on the device. So the step
is planned and launched before the host reads these tokens.

The tokens may turn out to end a sequence. Its row in the step launched ahead is then wasted and ignored. The key and
value of this row lie in a block that belonged to the sequence, after all positions that the prefix cache knows. The
next owner of the block overwrites them in a later step, and a device computes steps in order. (Compare the overlap
schedulers of SGLang and vLLM, both 2024.)
"""

from service.engine.scheduling.block_pool import BlockPool
from service.engine.scheduling.sequence import SequenceStatus
from service.engine.scheduling.step_plan import Chunk, StepPlan, step_plan


def may_continue(chunk: Chunk) -> bool:
    """Return True if the sequence may get another token after the token being sampled, as far as its length says."""
    sequence = chunk.sequence
    return sequence.status is SequenceStatus.RUNNING and chunk.num_known_tokens + 1 < sequence.max_length


def plan_ahead(plan: StepPlan, pool: BlockPool, block_size: int, *, num_running: int) -> StepPlan | None:
    """Plan a decode of each continuing sequence of `plan`, and allocate the blocks that these sequences need.

    Return None if no sequence continues, if blocks are short, or if sequences outside of `plan` are running.
    Every chunk of `plan` must sample a token and have no draft.
    """
    if sum(chunk.sequence.status is SequenceStatus.RUNNING for chunk in plan.chunks) < num_running:
        return None
    following = [
        (row, Chunk(chunk.sequence, chunk.num_known_tokens, 1, True))
        for row, chunk in enumerate(plan.chunks)
        if may_continue(chunk)
    ]
    chunks = tuple([chunk for _, chunk in following])
    lacking = [chunk.sequence for chunk in chunks if chunk.start >= len(chunk.sequence.block_table) * block_size]
    blocks = pool.allocate(len(lacking)) if chunks else None
    if blocks is None:
        return None
    for sequence, block in zip(lacking, blocks, strict=True):
        sequence.block_table.append(block)
    return step_plan(chunks, previous_rows=tuple([row for row, _ in following]))
