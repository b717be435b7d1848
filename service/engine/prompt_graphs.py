"""Steps with prompts, recorded in pieces: what is computed between two layers' attentions is one launch (CUDA graphs).

At 512 tokens a layer's matrices take a modern card less time than the host needs to launch its dozen kernels one by
one. Attention over the cache depends on lengths, so it is computed as ever; all between is row by row, and is recorded
for a few numbers of rows and padded. A model is recorded as it is: its attention is one that ends a piece, so that
whatever a family computes lies in one. What lives from piece to piece (the residual, the rotation) stays where it was
while recording, since pieces share memory and are replayed in the order in which they were recorded.

How pieces are recorded is injected: `CudaPieces` on a GPU; `uncut` computes them anew each time, so that the same code
runs, and is tested, on a CPU.

Legend: T packed tokens, E hidden size, H heads, D head dimension.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from model.attention.form import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache
from model.transformer import Attention, Transformer

Between = Callable[[AttentionForm], None]
# Beyond it matrices take longer than their launches.
MAX_ROWS = 2048
_MIN_ROWS = 64
_WARM_UPS = 2
_TOLERANCE = 2e-2  # of the largest number, should a library take another kernel


def prompt_rows(most: int) -> tuple[int, ...]:
    """Numbers of rows to record, the biggest first: 64, 96, 128, 192 and so on, so that a third at most is padding."""
    most = min(most, MAX_ROWS)
    sizes = {each << power for power in range(6) for each in (_MIN_ROWS, _MIN_ROWS * 3 // 2)}
    return tuple(sorted({size for size in sizes if size < most} | {most}, reverse=True))


class Pieces(Protocol):
    """Records a computation that calls what it is given between its pieces."""

    def __call__(self, compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
        """What replays the pieces, calls what it is given between them, and gives the tensor that holds the result."""
        ...


def uncut(compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
    """`Pieces` for any device: computed once, as if to record, and again at each replay."""
    compute(lambda form: None)
    return compute


class CudaPieces:
    """`Pieces` as CUDA graphs on one stream of its own, which share one pool of memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
        """See `Pieces`."""
        graphs: list[torch.cuda.CUDAGraph] = []
        forms: list[AttentionForm] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut(form: AttentionForm) -> None:
            graphs[-1].capture_end()
            forms.append(form)
            begin()

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute(lambda form: None)
            torch.cuda.synchronize()
            begin()
            try:
                result = compute(cut)
            except BaseException:
                with suppress(RuntimeError):  # it may have been the recording that failed
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay(between: Between) -> Tensor:
            graphs[0].replay()
            for graph, form in zip(graphs[1:], forms, strict=True):
                between(form)
                graph.replay()
            return result

        return replay


class _Crossing:
    """In place of attention while pieces are recorded: queries, keys and values are put where attention finds them, and
    what it will have made of them is taken from where it will put it. One set of tensors for all layers and sizes.
    """

    def __init__(self) -> None:
        self.between: Between = lambda form: None
        self.tensors: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # THD each: queries, keys, values, mixed

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        form: AttentionForm,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        """See `model.attention.interface.AttentionBackend`. The first call has the most rows."""
        if self.tensors is None:
            q_held, k_held, v_held = (
                torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD, v_TKD)
            )
            self.tensors = q_held, k_held, v_held, v_TKD.new_zeros((*q_THD.shape[:2], v_TKD.shape[2]))
        *held, mixed_THD = self.tensors
        for ours, given in zip(held, (q_THD, k_TKD, v_TKD), strict=True):
            ours[: len(given)].copy_(given)
        self.between(form)
        return mixed_THD[: len(q_THD)]


class PromptGraphs:
    """A model's layers, recorded for some numbers of rows.

    Raises:
        ValueError: a recording computes something else than the model.
    """

    def __init__(self, model: Transformer, pieces: Pieces, rows: tuple[int, ...]) -> None:
        self._model = model
        self._attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self._backends = [attention.backend for attention in self._attentions]
        self._crossing = _Crossing()
        device = model.token_embedding.weight.device
        self._ids_T, self._positions_T = torch.zeros((2, max(rows)), dtype=torch.int64, device=device).unbind()
        self._replays = {count: pieces(self._whole(count)) for count in sorted(rows, reverse=True)}
        for count in rows:
            self._check(count)

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor | None:
        """`Transformer.hidden`, until the next call; None where no recording has so many rows."""
        num_tokens = len(token_ids_T)
        count = min((count for count in self._replays if count >= num_tokens), default=None)
        if count is None:
            return None
        self._ids_T[:num_tokens].copy_(token_ids_T)
        self._positions_T[:num_tokens].copy_(metadata.positions_T)
        assert self._crossing.tensors is not None
        *given, mixed_THD = (x[:num_tokens] for x in self._crossing.tensors)

        def attend(form: AttentionForm) -> None:
            backend = self._backends[form.layer]
            mixed_THD.copy_(backend.attend(*given, form=form, metadata=metadata, kv_cache=kv_cache))

        return self._replays[count](attend)[:num_tokens]

    def _whole(self, count: int) -> Callable[[Between], Tensor]:
        """All layers over the first rows of the static inputs."""
        positions_T = self._positions_T[:count]
        metadata = AttentionMetadata(query_lengths=(count,), context_lengths=(count,), positions_T=positions_T)

        def compute(between: Between) -> Tensor:
            self._crossing.between = between
            for attention in self._attentions:
                attention.backend = self._crossing
            try:
                return Transformer.hidden(self._model, self._ids_T[:count], metadata, None)
            finally:
                for attention, backend in zip(self._attentions, self._backends, strict=True):
                    attention.backend = backend

        return compute

    def _check(self, count: int) -> None:
        device, config = self._ids_T.device, self._model.config
        generator = torch.Generator().manual_seed(count)
        lengths = [min(config.max_context_length, count - at) for at in range(0, count, config.max_context_length)]
        ids_T = torch.randint(config.vocab_size, (count,), generator=generator).to(device)
        metadata = AttentionMetadata.uncached(tuple(lengths), str(device))
        expected_TE = Transformer.hidden(self._model, ids_T, metadata, None).float()
        found_TE = self.hidden(ids_T, metadata, None)
        assert found_TE is not None
        error = ((found_TE.float() - expected_TE).abs().max() / expected_TE.abs().max()).item()
        if not error <= _TOLERANCE:  # nor is NaN
            raise ValueError(f"{count} rows differ by {error:.1e} of the largest number")


class RecordedTransformer(Transformer):
    """A transformer whose steps over a cache are replayed where a recording holds them."""

    prompt_graphs: PromptGraphs

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """See `Transformer.hidden`."""
        found_TE = None if kv_cache is None else self.prompt_graphs.hidden(token_ids_T, metadata, kv_cache)
        return super().hidden(token_ids_T, metadata, kv_cache) if found_TE is None else found_TE


@torch.inference_mode()
def record_prompts(model: Transformer, pieces: Pieces, max_rows: int) -> tuple[int, ...]:
    """Record a model's layers for steps of up to so many rows, which are replayed from then on. Returns the numbers.

    Steps that are recorded whole are recorded before.

    Raises:
        ValueError: see `PromptGraphs`; RuntimeError: the device does not record it.
    """
    rows = prompt_rows(max_rows)
    graphs = PromptGraphs(model, pieces, rows)
    model.__class__ = RecordedTransformer
    assert isinstance(model, RecordedTransformer)
    model.prompt_graphs = graphs
    return rows
