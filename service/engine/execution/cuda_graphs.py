"""CUDA graphs of decode steps: captured once, then replayed with one launch instead of hundreds of kernel launches.

A graph reads and writes tensors at fixed addresses, so one graph is captured for each of a few shapes (buckets). A step
is padded to the smallest bucket that holds it. Only the layers are captured, from token ids to hidden states.

Legend: T rows (one token of one sequence each), N entries of a row's block table, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.system.device_copy import copy_to_device
from service.engine.execution.model_inputs import ModelInputs
from service.engine.scheduling.step_plan import MIN_ROWS

# Maximum rows of a graph. In a larger step the launch overhead of single kernels is small.
MAX_ROWS = 512
# Ratio between consecutive widths of block tables, and the maximum number of different widths.
_NARROWER, _MAX_WIDTHS = 4, 3
_MIN_WIDTH = 32
# Runs of the model before a capture: they compile kernels and allocate library workspaces, which a capture must not do.
_WARM_UPS = 2


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """Shape of a captured decode step: rows (one token of one sequence each), and entries of a row's block table."""

    rows: int
    width: int

    @property
    def num_numbers(self) -> int:
        """Number of int64 in which a decode step's token ids, positions, slots and block tables (int32) fit."""
        return self.rows * 3 + -(-self.rows * self.width // 2)

    def views(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the parts of a step's integers (one flat tensor): token ids T, positions T, slots T, tables TN."""
        ids_T, positions_T, slots_T = numbers[: 3 * self.rows].view(3, self.rows)
        tables = numbers[3 * self.rows : self.num_numbers].view(torch.int32)
        return ids_T, positions_T, slots_T, tables[: self.rows * self.width].view(self.rows, self.width)


def buckets(max_rows: int, max_width: int) -> tuple[Bucket, ...]:
    """Return the shapes of decode steps to capture as CUDA graphs, the largest first: later graphs reuse its memory."""
    rows = [MIN_ROWS]
    while rows[-1] < min(max_rows, MAX_ROWS):
        rows.append(2 * rows[-1])
    widths = [max_width]
    while len(widths) < _MAX_WIDTHS and widths[-1] >= _NARROWER * _MIN_WIDTH:
        widths.append(-(-widths[-1] // _NARROWER))
    return tuple(sorted((Bucket(r, w) for r in rows for w in widths), reverse=True))


def smallest(candidates: Sequence[Bucket], rows: int, width: int) -> Bucket | None:
    """Return the captured shape with the fewest rows, then the narrowest block table, that holds a decode step.

    Return None if no captured shape has at least `rows` rows, and at least `width` entries in a block table.
    """
    return min((b for b in candidates if b.rows >= rows and b.width >= width), default=None)


# Function that captures a computation without arguments. Its result replays the computation and returns the tensor.
Capture: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class CudaCapture:
    """CUDA graph capture. All graphs share one memory pool, because only one graph runs at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # for all captures: cuBLAS keeps a workspace for each stream
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a computation as a CUDA graph, and return a function that replays the graph."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (grammars, masks) never use the device and may run during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """CUDA graphs of decode steps, one for each shape. All read their inputs (integers) from one static tensor.

    hidden: returns the hidden states TE for token ids T, attention metadata and KV-cache. Its attention backend must
        read only positions, slots and block tables of the metadata, as `model.attention.paged.PagedAttention` does.
    cache: KV-cache whose last block belongs to no sequence. Rows of padding read and write this block.
    """

    def __init__(
        self,
        hidden: Callable[[Tensor, AttentionMetadata, KVCache], Tensor],
        cache: KVCache,
        *,
        capture: Capture,
        shapes: Sequence[Bucket],
    ) -> None:
        self.shapes = tuple(shapes)
        self._scratch_block = cache.num_blocks - 1
        self._scratch_slot = self._scratch_block * cache.block_size
        count = max(bucket.num_numbers for bucket in shapes)
        self._device = torch.zeros(count, dtype=torch.int64, device=cache.keys[0].device)
        self._replays: dict[Bucket, Callable[[], Tensor]] = {}
        for bucket in shapes:
            self._replays[bucket] = capture(partial(hidden, *self._padding(bucket), cache))

    def _padding(self, bucket: Bucket) -> tuple[Tensor, AttentionMetadata]:
        """Return a bucket's static inputs, filled with padding, so that a capture writes only to the scratch block."""
        ids_T, positions_T, slots_T, tables_TN = bucket.views(self._device)
        ids_T.zero_()
        positions_T.zero_()
        slots_T.fill_(self._scratch_slot)
        tables_TN.fill_(self._scratch_block)
        # Context lengths are unknown at capture: the attention kernel derives them from the positions.
        return ids_T, AttentionMetadata(
            query_lengths=(1,) * bucket.rows,
            context_lengths=(1,) * bucket.rows,
            positions_T=positions_T,
            slot_mapping_T=slots_T,
            block_tables_BN=tables_TN,
        )

    def bucket(self, metadata: AttentionMetadata) -> Bucket | None:
        """Return the captured shape for a step; None if it is no decode step, or exceeds all captured shapes."""
        if not metadata.is_decode or metadata.block_tables_BN is None:
            return None
        return smallest(self.shapes, *metadata.block_tables_BN.shape)

    def fill(self, bucket: Bucket, inputs: ModelInputs, others: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy a decode step's inputs, padded to the bucket, to the device. Return other arrays on the device.

        All take one copy from the host. The next `replay` reads the inputs.
        """
        metadata = inputs.metadata
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        rows, width = metadata.block_tables_BN.shape
        numbers = np.empty(bucket.num_numbers, dtype=np.int64)
        ids_T, positions_T, slots_T, tables_TN = (part.numpy() for part in bucket.views(torch.from_numpy(numbers)))
        for padded_T, values_T, padding in (
            (ids_T, inputs.token_ids_T, 0),
            (positions_T, metadata.positions_T, 0),
            (slots_T, metadata.slot_mapping_T, self._scratch_slot),
        ):
            padded_T[:rows] = values_T.numpy()
            padded_T[rows:] = padding
        tables_TN[:rows, :width] = metadata.block_tables_BN.numpy()
        tables_TN[:rows, width:] = self._scratch_block
        tables_TN[rows:] = self._scratch_block
        copied_N, *tensors = copy_to_device(self._device.device, [numbers, *others])
        self._device[: len(copied_N)].copy_(copied_N)
        return tensors

    def replay(self, bucket: Bucket, num_rows: int, sampled_B: Tensor | None = None) -> Tensor:
        """Compute a decode step by replaying a CUDA graph. Return its hidden states TE, valid until the next call.

        sampled_B: ids, on the device, of the step's first B input tokens, if the host does not know these ids yet.
        """
        if sampled_B is not None:
            self._device[: len(sampled_B)].copy_(sampled_B)
        return self._replays[bucket]()[:num_rows]
