"""Decode steps that are recorded once and replayed: one launch instead of hundreds (CUDA graphs).

A recording reads and writes tensors that stay where they are. So there is one for each of a few shapes (buckets); a
step takes the smallest that holds it, is copied into the static inputs and padded with rows that nobody reads. How a
step is recorded is injected: `CudaCapture` on a GPU; `call_again` calls the same function at each replay, so that the
same code runs, and is tested, on a CPU.

Only the layers are recorded, from token ids to hidden states. Logits, which a step may want of other rows, masks and
draws follow as in any other step.

Legend: T rows, one token of a sequence each; N blocks of a table; E hidden size; P slots a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from service.engine.inputs import ModelInputs
from service.engine.plan import MIN_ROWS

# Beyond it a step is long enough that launching its kernels one by one costs little.
MAX_ROWS = 512
# How much narrower the tables of each next recording are, and how many widths there are at most.
_NARROWER, _MAX_WIDTHS = 4, 3
_MIN_WIDTH = 32
# Runs before a recording: kernels are compiled and libraries make their workspaces, which a recording must not.
_WARM_UPS = 2


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """A shape that is recorded: rows, and blocks of each row's table."""

    rows: int
    width: int

    @property
    def num_numbers(self) -> int:
        """Ids, positions, slots, and tables."""
        return self.rows * (3 + self.width)


def buckets(max_rows: int, max_width: int) -> tuple[Bucket, ...]:
    """Those to record, the biggest first: rows in powers of two from `MIN_ROWS`, tables ever narrower by four.

    The biggest first, because later recordings use the memory that it took.
    """
    rows = [MIN_ROWS]
    while rows[-1] < min(max_rows, MAX_ROWS):
        rows.append(2 * rows[-1])
    widths = [max_width]
    while len(widths) < _MAX_WIDTHS and widths[-1] >= _NARROWER * _MIN_WIDTH:
        widths.append(-(-widths[-1] // _NARROWER))
    return tuple(sorted((Bucket(r, w) for r in rows for w in widths), reverse=True))


def smallest(candidates: Sequence[Bucket], rows: int, width: int) -> Bucket | None:
    """The one with the fewest rows, then the narrowest, that holds a step; None where none does."""
    return min((b for b in candidates if b.rows >= rows and b.width >= width), default=None)


class Capture(Protocol):
    """Records a computation without arguments whose results stand in tensors of its own."""

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What replays it, and gives the tensor that then holds the result."""
        ...


def call_again(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A `Capture` for any device: each replay calls the function, and its result is copied to where the first was."""
    result = compute()

    def replay() -> Tensor:
        return result.copy_(compute())

    return replay


class CudaCapture:
    """A `Capture` of CUDA graphs, which share one pool of memory: only one of them is ever running.

    Everything, the runs before a recording too, happens on one stream of its own: cuBLAS keeps a workspace for each.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: Any = None

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process (grammars, masks) never touch the device, and may go on.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StaticInputs:
    """A step's integers, where recordings find them: one tensor on the device, filled by one copy.

    On a GPU the copy is made of pinned memory, without waiting: `fill` waits for the copy before it, and not for what
    computes.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(bucket.num_numbers, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(bucket.num_numbers, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None

    def views(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the device: ids, positions and slots, T each, and tables TN."""
        return _views(self._device, bucket)

    def fill(self, bucket: Bucket, inputs: ModelInputs, scratch_slot: int, scratch_block: int) -> None:
        """Put a step of decodes that fits the bucket in the place of what was there."""
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
    """Recordings of decode steps.

    Args:
        hidden: the layers: ids T and what attention must know, to hidden states TE. It attends by a backend that reads
            positions, slots and tables alone, such as `model.attention.paged.PagedAttention`.
        capture: how a recording is made.
        shapes: what to record, the biggest first.
        scratch_block: the block that rows of padding read and write, of `block_size` slots.
        device: where all tensors are.

    Raises:
        RuntimeError: a replay gives other numbers than the step that was recorded.
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
            self._replays[bucket] = self._recorded(hidden, capture, bucket)

    def _recorded(
        self, hidden: Callable[[Tensor, AttentionMetadata], Tensor], capture: Capture, bucket: Bucket
    ) -> Callable[[], Tensor]:
        """A recording, compared with what it recorded.

        The rows of that trial are the first two tokens of one text in the scratch block: no other block is touched,
        and what several rows write to one slot is the same.
        """
        ids_T, positions_T, slots_T, tables_TN = self._inputs.views(bucket)
        positions_T.copy_(torch.arange(bucket.rows) % min(2, self._block_size))
        ids_T.zero_()
        slots_T.copy_(positions_T + self._scratch_block * self._block_size)
        tables_TN.fill_(self._scratch_block)
        compute = _step(hidden, self._inputs, bucket)
        replay = capture(compute)
        expected = compute().float()
        if not torch.allclose(replay().float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            raise RuntimeError(f"a replayed step of {bucket.rows} rows differs from the step that was recorded")
        return replay

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """What has been recorded."""
        return tuple(self._replays)

    def hidden(self, inputs: ModelInputs, drawn_B: Tensor | None = None) -> Tensor | None:
        """Hidden states TE of a step's rows, valid until the next; None for a step that no recording holds.

        drawn_B: on the device, the first token ids, where the host does not know them.
        """
        metadata = inputs.metadata
        if not metadata.is_decode or metadata.block_tables_BN is None:
            return None
        bucket = smallest(self.shapes, *metadata.block_tables_BN.shape)
        if bucket is None:
            return None
        self._inputs.fill(bucket, inputs, self._scratch_block * self._block_size, self._scratch_block)
        if drawn_B is not None:
            self._inputs.views(bucket)[0][: len(drawn_B)].copy_(drawn_B)
        return self._replays[bucket]()[: len(inputs.token_ids_T)]


def _step(
    hidden: Callable[[Tensor, AttentionMetadata], Tensor], inputs: StaticInputs, bucket: Bucket
) -> Callable[[], Tensor]:
    """The computation that is recorded for a bucket."""
    ids_T, positions_T, slots_T, tables_TN = inputs.views(bucket)
    # Lengths of contexts are not known when a step is recorded: decoding takes them from the positions.
    metadata = AttentionMetadata(
        query_lengths=(1,) * bucket.rows,
        context_lengths=(1,) * bucket.rows,
        positions_T=positions_T,
        slot_mapping_T=slots_T,
        block_tables_BN=tables_TN,
    )
    return lambda: hidden(ids_T, metadata)
