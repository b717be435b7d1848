"""The step after one that is still being computed, decided before its tokens are known. Pure Python.

A device that computes beside the host stands still while the host reads a step's tokens, commits and tells them,
decides what is next and builds its tensors. Where every sequence only gets its next token, all that the next step needs
of this one is the tokens, and these as numbers on the device. So it is decided, and launched, before they are read.

What the host then finds in them may end a sequence: its row of the step ahead was computed for nothing, and is passed
over. The key and value of that row lie in a block that was the sequence's own when the step was launched, behind all
that the prefix cache knows of; whoever gets the block next writes to it in a later step, and a device computes steps in
their order. (Steps that are scheduled ahead: SGLang's and vLLM's overlap schedulers, both 2024.)
"""

from service.engine.block_pool import BlockPool
from service.engine.plan import Chunk, StepPlan, step_plan
from service.engine.sequence import SequenceStatus


def goes_on(chunk: Chunk) -> bool:
    """Whether its sequence gets another token after the one that is being drawn, for all that is known before."""
    sequence = chunk.sequence
    return sequence.status is SequenceStatus.RUNNING and chunk.num_known_tokens + 1 < sequence.max_length


def plan_ahead(plan: StepPlan, pool: BlockPool, block_size: int, *, num_running: int) -> StepPlan | None:
    """One token more of each sequence that goes on; None where nobody does, where they lack blocks, and where others
    run beside those of `plan`.

    Every chunk of `plan` must draw, and none have a draft. A block that a sequence needs becomes its own.
    """
    if sum(chunk.sequence.status is SequenceStatus.RUNNING for chunk in plan.chunks) < num_running:
        return None
    following = [
        (row, Chunk(chunk.sequence, chunk.num_known_tokens, 1, True))
        for row, chunk in enumerate(plan.chunks)
        if goes_on(chunk)
    ]
    chunks = tuple([chunk for _, chunk in following])
    lacking = [chunk.sequence for chunk in chunks if chunk.start >= len(chunk.sequence.block_table) * block_size]
    blocks = pool.allocate(len(lacking)) if chunks else None
    if blocks is None:
        return None
    for sequence, block in zip(lacking, blocks, strict=True):
        sequence.block_table.append(block)
    return step_plan(chunks, after_rows=tuple([row for row, _ in following]))
