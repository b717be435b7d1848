"""A text's hidden states, pooled into one vector: its embedding.

Rows come chunk by chunk, as the scheduler plans the text; their sum is kept on the host. The mean of all tokens needs
the hidden state of each, so that nothing of such a text is taken from the prefix cache, and a preemption begins again.

Legend: E hidden size.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.engine.plan import Chunk
from service.messages import Pooling


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Packed tokens of a step whose hidden states, after the final norm, are to be added up for a sequence."""

    uid: str
    first_row: int
    num_rows: int


def pooled_rows(chunks: tuple[Chunk, ...]) -> tuple[PooledRows, ...]:
    """What of a step's packed tokens is pooled, sequence by sequence."""
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
    """The sum of what has been pooled of one sequence.

    In float64, where sums of float32 are exact as long as these are within 2^19 of each other: chunks may be cut
    anywhere, and the vector's bits are the same.
    """

    sum_E: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, chunk: Chunk, sum_E: NDArray[np.float64]) -> None:
        """Take up a chunk's rows. One that begins the text begins the sum."""
        self.sum_E = self.sum_E + sum_E if chunk.start and len(self.sum_E) else sum_E

    def embedding(self) -> bytes:
        """The vector of length 1 in the direction of the sum, which is the mean's: native float32."""
        length = max(float(np.linalg.norm(self.sum_E)), float(np.finfo(np.float32).tiny))
        return (self.sum_E / length).astype(np.float32).tobytes()
