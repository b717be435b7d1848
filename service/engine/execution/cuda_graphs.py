"""CUDA graphs of decode steps: captured once, replayed with one launch instead of hundreds.

A graph reads and writes tensors at fixed addresses, so one graph is captured for each of a few shapes (buckets). A step
uses the smallest bucket that holds it: its inputs are copied to the static inputs, and unused rows are padding. The
capture is injected. `CudaCapture` captures on a GPU. `call_again` calls the function at each replay, so that the same
code runs and is tested on a CPU.

Only the layers are captured, from token ids to hidden states. Logits, masks and sampling run outside the graph.

Legend: T rows, one token of a sequence each; N blocks of a table; E hidden size; P slots a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from service.engine.execution.model_inputs import ModelInputs
from service.engine.scheduling.step_plan import MIN_ROWS

# Maximum rows of a graph. In a larger step the launch overhead of single kernels is small.
MAX_ROWS = 512
# Ratio between consecutive widths of block tables, and the maximum number of widths.
_NARROWER, _MAX_WIDTHS = 4, 3
_MIN_WIDTH = 32
# Runs before a capture: they compile kernels and allocate library workspaces, which a capture must not do.
_WARM_UPS = 2


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """Shape of a captured step: number of rows, and blocks in each row's block table."""

    rows: int
    width: int

    @property
    def num_numbers(self) -> int:
        """Number of input integers: ids, positions, slots and block tables."""
        return self.rows * (3 + self.width)


def buckets(max_rows: int, max_width: int) -> tuple[Bucket, ...]:
    """Return the shapes to capture: rows in powers of two from `MIN_ROWS`, table widths in steps of a factor of four.

    The largest comes first, because later captures reuse its memory.
    """
    rows = [MIN_ROWS]
    while rows[-1] < min(max_rows, MAX_ROWS):
        rows.append(2 * rows[-1])
    widths = [max_width]
    while len(widths) < _MAX_WIDTHS and widths[-1] >= _NARROWER * _MIN_WIDTH:
        widths.append(-(-widths[-1] // _NARROWER))
    return tuple(sorted((Bucket(r, w) for r in rows for w in widths), reverse=True))


def smallest(candidates: Sequence[Bucket], rows: int, width: int) -> Bucket | None:
    """Return the bucket that fits a step with the fewest rows, then the narrowest tables; None if no bucket fits."""
    return min((b for b in candidates if b.rows >= rows and b.width >= width), default=None)


# Captures a computation without arguments. Returns a function that replays it and returns the tensor with the result.
Capture: TypeAlias = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def call_again(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Replay by calling the function again: a `Capture` for any device. The result is copied to a fixed tensor."""
    result = compute()

    def replay() -> Tensor:
        return result.copy_(compute())

    return replay


class CudaCapture:
    """CUDA graph capture. All graphs share one memory pool, because only one graph runs at a time.

    Captures and the runs before them use one separate stream, because cuBLAS keeps a workspace for each stream.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a computation as a CUDA graph, see `Capture`."""
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


class StaticInputs:
    """Static input tensor of all CUDA graphs: the integers of a step, filled by one copy to the device.

    On a GPU the copy from pinned memory is asynchronous. `fill` waits only for the previous copy, not for kernels.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(bucket.num_numbers, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(bucket.num_numbers, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def views(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return device views of a bucket: ids T, positions T, slots T and block tables TN."""
        return _views(self._device, bucket)

    def fill(self, bucket: Bucket, inputs: ModelInputs, scratch_slot: int, scratch_block: int) -> None:
        """Copy the inputs of a decode step to the device, padded to the bucket."""
        if self._copied is not None:
            self._copied.synchronize()
        metadata = inputs.metadata
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        rows, width = metadata.block_tables_BN.shape
        ids_T, positions_T, slots_T, tables_TN = _views(self._host, bucket)
        for static_T, values_T, padding in (
            (ids_T, inputs.token_ids_T, 0),
            (positions_T, metadata.positions_T, 0),
            (slots_T, metadata.slot_mapping_T, scratch_slot),
        ):
            static_T[:rows] = values_T
            static_T[rows:] = padding
        tables_TN[:rows, :width] = metadata.block_tables_BN
        tables_TN[:rows, width:] = scratch_block
        tables_TN[rows:] = scratch_block
        count = bucket.num_numbers
        self._device[:count].copy_(self._host[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _views(numbers: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = bucket.rows
    ids_T, positions_T, slots_T = numbers[: 3 * rows].view(3, rows)
    return ids_T, positions_T, slots_T, numbers[3 * rows : bucket.num_numbers].view(rows, bucket.width)


class DecodeGraphs:
    """CUDA graphs of decode steps, one for each bucket.

    Args:
        hidden: computes the layers: token ids T and attention metadata to hidden states TE. Its attention backend must
            read only positions, slots and block tables, such as `model.attention.paged.PagedAttention`.
        capture: captures a computation.
        shapes: shapes to capture, the largest first.
        scratch_block: KV block that padding rows read and write.
        block_size: tokens per KV block.
        device: device of all tensors.
    """

    def __init__(
        self,
        hidden: Callable[[Tensor, AttentionMetadata], Tensor],
        *,
        capture: Capture,
        shapes: Sequence[Bucket],
        scratch_block: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._scratch_block, self._block_size = scratch_block, block_size
        self._inputs = StaticInputs(max(shapes, key=lambda bucket: bucket.num_numbers), device)
        self._replays: dict[Bucket, Callable[[], Tensor]] = {}
        for bucket in shapes:
            self._replays[bucket] = self._captured(hidden, capture, bucket)

    def _captured(
        self, hidden: Callable[[Tensor, AttentionMetadata], Tensor], capture: Capture, bucket: Bucket
    ) -> Callable[[], Tensor]:
        """Capture a bucket. The captured rows write to the scratch block only."""
        ids_T, positions_T, slots_T, tables_TN = self._inputs.views(bucket)
        ids_T.zero_()
        positions_T.zero_()
        slots_T.fill_(self._scratch_block * self._block_size)
        tables_TN.fill_(self._scratch_block)
        # Context lengths are unknown at capture: the attention kernel derives them from the positions.
        metadata = AttentionMetadata(
            query_lengths=(1,) * bucket.rows,
            context_lengths=(1,) * bucket.rows,
            positions_T=positions_T,
            slot_mapping_T=slots_T,
            block_tables_BN=tables_TN,
        )
        return capture(lambda: hidden(ids_T, metadata))

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """Captured shapes."""
        return tuple(self._replays)

    def hidden(self, inputs: ModelInputs, sampled_B: Tensor | None = None) -> Tensor | None:
        """Return the hidden states TE of a step by replay, valid until the next call; None if no captured shape fits.

        sampled_B: the first token ids, on the device, if the host does not know them yet.
        """
        metadata = inputs.metadata
        if not metadata.is_decode or metadata.block_tables_BN is None:
            return None
        bucket = smallest(self.shapes, *metadata.block_tables_BN.shape)
        if bucket is None:
            return None
        self._inputs.fill(bucket, inputs, self._scratch_block * self._block_size, self._scratch_block)
        if sampled_B is not None:
            self._inputs.views(bucket)[0][: len(sampled_B)].copy_(sampled_B)
        return self._replays[bucket]()[: len(inputs.token_ids_T)]
