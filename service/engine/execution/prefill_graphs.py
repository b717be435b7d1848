"""Piecewise CUDA graphs of steps with prefills: one launch for everything between the attention of two layers.

At 512 tokens, a modern GPU computes a layer's matrix products faster than the host launches its dozen kernels.
Attention over the KV-cache depends on lengths, so it runs outside the graphs. Everything else works row by row, so it
is captured for a few numbers of rows, and steps are padded. During the capture, a stand-in for attention ends each
piece, so that the model code of every family is captured unchanged. Tensors that live across pieces (residual, rotary
embedding) keep their addresses, because pieces share memory and are replayed in the order of their capture.

The capture is injected. `CudaPieces` captures on a GPU. `uncut` computes the pieces anew each time, so that the same
code runs and is tested on a CPU.

Legend: T packed tokens, E hidden size, H heads, D head dimension.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Attention, Transformer

Between = Callable[[AttentionForm], None]
# Maximum rows of a graph. In a larger step, matrix products take longer than kernel launches.
MAX_ROWS = 2048
_MIN_ROWS = 64
_WARM_UPS = 2
_TOLERANCE = 2e-2  # relative to the largest number: a library may choose another kernel during capture


def prompt_rows(most: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture, the largest first: 64, 96, 128, 192 and so on.

    From 64 rows on, at most a third of a replay is padding.
    """
    most = min(most, MAX_ROWS)
    sizes = {each << power for power in range(6) for each in (_MIN_ROWS, _MIN_ROWS * 3 // 2)}
    return tuple(sorted({size for size in sizes if size < most} | {most}, reverse=True))


class Pieces(Protocol):
    """Captures a computation in pieces. The computation calls its argument between pieces."""

    def __call__(self, compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
        """Return a function that replays the pieces, calls its argument between them, and returns the result."""
        ...


def uncut(compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
    """Replay by computing again: `Pieces` for any device. Computes once at capture, like `CudaPieces`."""
    compute(lambda form: None)
    return compute


class CudaPieces:
    """`Pieces` as CUDA graphs, captured on one separate stream, with a shared memory pool."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
        """Capture a computation as one CUDA graph for each piece, see `Pieces`."""
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
                with suppress(RuntimeError):  # the capture itself may have failed
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
    """Attention backend during capture: copies queries, keys and values to static tensors and ends a piece.

    It returns a static tensor, which attention fills at replay before the next piece. All layers and sizes share one
    set of static tensors.
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
        """End a piece, see `model.attention.backends.AttentionBackend`. The first call must have the most rows."""
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
    """Piecewise graphs of a model's layers for some numbers of rows.

    Raises:
        ValueError: a replay differs from the model.
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
        """Return the hidden states TE of a step, valid until the next call; None if the step has too many rows."""
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
        """Return the computation of all layers over the first `count` rows of the static inputs."""
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
        if not error <= _TOLERANCE:  # also true for NaN
            raise ValueError(f"{count} rows differ by {error:.1e} of the largest number")


class GraphedTransformer(Transformer):
    """Transformer that replays piecewise graphs for steps over a KV-cache that fit a captured size."""

    prompt_graphs: PromptGraphs

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """Return the hidden states TE, by replay if possible, see `Transformer.hidden`."""
        found_TE = None if kv_cache is None else self.prompt_graphs.hidden(token_ids_T, metadata, kv_cache)
        return super().hidden(token_ids_T, metadata, kv_cache) if found_TE is None else found_TE


@torch.inference_mode()
def capture_prompts(model: Transformer, pieces: Pieces, max_rows: int) -> tuple[int, ...]:
    """Capture a model's layers for steps of up to `max_rows` rows, and return the captured numbers of rows.

    From then on the model replays these graphs. Whole graphs of decode steps must be captured before.

    Raises:
        ValueError: a replay differs from the model.
        RuntimeError: the device cannot capture the model.
    """
    rows = prompt_rows(max_rows)
    graphs = PromptGraphs(model, pieces, rows)
    model.__class__ = GraphedTransformer
    assert isinstance(model, GraphedTransformer)
    model.prompt_graphs = graphs
    return rows
