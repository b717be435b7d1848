"""Pooling of a text's hidden states into one vector: its embedding.

Hidden states arrive chunk by chunk, and their sum is kept on the host. Mean pooling needs the hidden state of every
token. So such a text takes no blocks from the prefix cache, and starts again after a preemption.

Legend: E hidden size.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.engine.scheduling.step_plan import Chunk
from service.ipc.messages import Pooling


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Packed tokens of a step whose hidden states, after the final norm, are summed for a sequence."""

    uid: str
    first_row: int
    num_rows: int


def pooled_rows(chunks: tuple[Chunk, ...]) -> tuple[PooledRows, ...]:
    """Return the packed tokens to pool for each sequence of a step."""
    rows: list[PooledRows] = []
    start_row = 0
    for chunk in chunks:
        end_row = start_row + chunk.num_tokens
        pooling = chunk.sequence.pooling
        if pooling is Pooling.MEAN:
            rows.append(PooledRows(chunk.sequence.uid, start_row, chunk.num_tokens))
        elif pooling is Pooling.LAST and chunk.start + chunk.num_tokens == chunk.sequence.num_prompt_tokens:
            rows.append(PooledRows(chunk.sequence.uid, end_row - 1, 1))
        start_row = end_row
    return tuple(rows)


@dataclass(slots=True)
class Pool:
    """Sum of the pooled hidden states of one sequence.

    The sum is in float64, in which sums of float32 numbers within a factor of 2^19 of each other are exact. So the
    embedding is bitwise identical however the prompt is divided into chunks.
    """

    sum_E: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, chunk: Chunk, sum_E: NDArray[np.float64]) -> None:
        """Add the sum of a chunk. The first chunk of a text resets the sum."""
        self.sum_E = self.sum_E + sum_E if chunk.start and len(self.sum_E) else sum_E

    def embedding(self) -> bytes:
        """Return the embedding, normalized to length 1, as native float32. Sum and mean have the same direction."""
        length = max(float(np.linalg.norm(self.sum_E)), float(np.finfo(np.float32).tiny))
        return (self.sum_E / length).astype(np.float32).tobytes()
