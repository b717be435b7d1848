"""One forward pass and one sample. Owns the model and the KV tensors."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.weights import weights_of_layer
from model.kv_cache import KVCache
from model.native_decode import Decoded
from model.native_transformer import NativeTransformer, by_native_kernels
from model.sampling import NO_TOKEN, most_likely, sample, sample_on_device, top_logprobs
from model.sampling_params import SamplingParams
from model.token_masks import only_allowed
from model.transformer import Transformer
from service.engine.graphs import Bucket, Capture, DecodeGraphs, buckets
from service.engine.inputs import ModelInputs
from service.engine.plan import MIN_ROWS
from service.engine.pooling import PooledRows
from service.messages import TokenLogprob


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one forward pass gave: a token for each row of `ModelInputs.params`, and log-probabilities where asked.

    token_ids: None for a sequence whose request leaves no token that may come next.
    logprobs: one entry a token; None for a sequence that asked for none, and where there is no token. Empty where
        nobody asked.
    prompt_logprobs: uid -> the scored successors of this chunk.
    pooled: uid -> the sum of the hidden states that `ModelInputs.pooled_rows` names, E float64.
    non_finite: the step's packed tokens whose hidden state, logits or pooled sum are NaN or infinite. What was sampled
        or scored of them means nothing.
    """

    token_ids: Sequence[int | None]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: dict[str, list[TokenLogprob]]
    pooled: dict[str, NDArray[np.float64]] = {}
    non_finite: frozenset[int] = frozenset()


class Launched(Protocol):
    """A step that a device computes, or will."""

    def read(self) -> StepOutputs:
        """Wait for it: the tokens it drew, and nothing else."""
        ...


class Runner(Protocol):
    """What the engine needs of whoever computes: the model's runner, or a fake in tests."""

    @property
    def min_rows(self) -> int:
        """Rows to which a smaller step is padded, since a row's bits would be others in fewer."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host is free while a launched step is computed."""
        ...

    def run(self, inputs: ModelInputs) -> StepOutputs:
        """Compute a step."""
        ...

    def launch(self, inputs: ModelInputs) -> Launched:
        """Begin a step of draws without rules, masks and scores, behind all that was launched before it. The inputs may
        be written over when this returns; their `after_rows` are of the step that was launched last."""
        ...

    def attention_weights(self, token_ids: Sequence[int], *, layer: int, heads: Sequence[int]) -> bytes:
        """What these tokens attend to, see `service.messages.Looked`."""
        ...


class ModelRunner:
    """Runs a transformer over a paged cache of `num_blocks` blocks, and one more that padding writes to.

    Where the model's attention is native and the kernels are loaded, they compute all of it, see
    `model.native_transformer`.

    Only the first `vocab_size` ids can be drawn: embeddings are often padded beyond the tokenizer's vocabulary, and
    an id without text must not come out.

    Args:
        held_as: the cache's dtype; None for the model's.
    """

    def __init__(
        self,
        model: Transformer | NativeTransformer,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        held_as: torch.dtype | None = None,
    ) -> None:
        self._model = by_native_kernels(model)
        self._vocab_size = vocab_size
        weight = model.token_embedding.weight
        self._device = weight.device
        self._is_elsewhere = weight.device.type != "cpu"
        self._cache = KVCache(
            model.config,
            num_blocks=num_blocks + 1,
            block_size=block_size,
            dtype=weight.dtype,
            device=weight.device,
            held_as=held_as,
        )
        self._graphs: DecodeGraphs | None = None
        self._drawn_B: Tensor | None = None  # by the step that was launched last, where it was computed

    @torch.inference_mode()
    def record(self, capture: Capture, *, max_rows: int, max_context_length: int) -> tuple[Bucket, ...]:
        """Record steps of decodes, before the first step; those of up to so many rows are replayed from then on.

        The model must attend by a backend that reads positions, slots and tables alone, see `DecodeGraphs`. Returns
        what was recorded.
        """
        self._graphs = DecodeGraphs(
            lambda token_ids_T, metadata: self._model.hidden(token_ids_T, metadata, self._cache),
            capture=capture,
            shapes=buckets(max_rows, -(-max_context_length // self._cache.block_size)),
            scratch_block=self._cache.num_blocks - 1,
            block_size=self._cache.block_size,
            device=self._device,
        )
        return self._graphs.shapes

    def run(self, inputs: ModelInputs) -> StepOutputs:
        """Compute a step: the ids go to the host in one copy."""
        if isinstance(self._model, NativeTransformer):
            return self._run(inputs)  # nothing here has gradients, and to say so costs as much as to draw
        with torch.inference_mode():
            return self._run(inputs)

    def launch(self, inputs: ModelInputs) -> Launched:
        """See `Runner`."""
        with torch.inference_mode():
            x_TE, logits_RV = self._compute(inputs)
            self._drawn_B = sample_on_device(logits_RV[: len(inputs.params)], inputs.params, inputs.positions)
            return _Draws(self._drawn_B, _sums(x_TE, logits_RV, inputs.metadata.logit_rows_R))

    def _compute(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """The step's hidden states TE, and the logits RV that are wanted of them."""
        drawn_B = self._drawn_before(inputs.after_rows) if inputs.after_rows else None
        x_TE = None if self._graphs is None else self._graphs.hidden(inputs, drawn_B)
        if x_TE is None:
            token_ids_T, metadata = inputs.token_ids_T, inputs.metadata
            if self._is_elsewhere:
                token_ids_T, metadata = token_ids_T.to(self._device, non_blocking=True), metadata.to(self._device)
            if drawn_B is not None:
                token_ids_T = torch.cat((drawn_B, token_ids_T[len(drawn_B) :]))
            x_TE = self._model.hidden(token_ids_T, metadata, self._cache)
        rows_R = inputs.metadata.logit_rows_R
        x_RE = x_TE if rows_R is None else x_TE[rows_R.to(self._device, non_blocking=True)]
        logits_RV = self._model.logits(x_RE)
        if logits_RV.shape[1] > self._vocab_size:
            logits_RV = logits_RV[:, : self._vocab_size]
        return x_TE, logits_RV

    def _drawn_before(self, rows: tuple[int, ...]) -> Tensor:
        """What the step that was launched last drew in these rows."""
        assert self._drawn_B is not None
        if rows == tuple(range(len(self._drawn_B))):
            return self._drawn_B
        return self._drawn_B[torch.tensor(rows).to(self._device, non_blocking=True)]

    def _run(self, inputs: ModelInputs) -> StepOutputs:
        decoded = self._decode(inputs)
        if decoded is None:
            likely = None
            x_TE, logits_RV = self._compute(inputs)
            non_finite = _non_finite(_sums(x_TE, logits_RV, inputs.metadata.logit_rows_R).cpu())
        else:
            likely, logits_RV = decoded
            x_TE = logits_RV[:, :0]  # nothing is pooled of sequences that decode
            non_finite = {row for row, token_id in enumerate(likely) if token_id < 0} if min(likely) < 0 else set()
        token_ids = _draw(logits_RV, inputs, likely) if inputs.params else []
        pooled = self._pool(x_TE, inputs.pooled_rows) if inputs.pooled_rows else {}
        for rows in inputs.pooled_rows:
            if not np.isfinite(pooled[rows.uid]).all():
                non_finite.add(rows.first_row)
        return StepOutputs(
            token_ids=token_ids,
            logprobs=_drawn_logprobs(logits_RV, token_ids, inputs.params) if inputs.wants_logprobs else [],
            prompt_logprobs={
                rows.uid: _token_logprobs(
                    logits_RV[rows.first_row : rows.first_row + len(rows.targets)], rows.targets, rows.num_top
                )
                for rows in inputs.prompt_rows
            },
            pooled=pooled,
            non_finite=frozenset(non_finite),
        )

    def _decode(self, inputs: ModelInputs) -> Decoded | None:
        """The step in one call of our own kernels, where they can."""
        model = self._model
        if not isinstance(model, NativeTransformer) or inputs.metadata.logit_rows_R is not None:
            return None
        return model.decode(inputs.token_ids_T, inputs.metadata, self._cache, num_ids=self._vocab_size)

    @property
    def min_rows(self) -> int:
        """See `Runner`. To our own kernels a row's bits are the same alone."""
        return 1 if isinstance(self._model, NativeTransformer) else MIN_ROWS

    @property
    def is_asynchronous(self) -> bool:
        """See `Runner`."""
        return self._device.type == "cuda"

    def _pool(self, x_TE: Tensor, pooled_rows: Sequence[PooledRows]) -> dict[str, NDArray[np.float64]]:
        """Sums of hidden states after the final norm, see `Pool`; they go to the host in one copy."""
        chunks = (x_TE[rows.first_row : rows.first_row + rows.num_rows] for rows in pooled_rows)
        sums_BE = torch.stack([self._model.final_norm(chunk_XE).double().sum(dim=0) for chunk_XE in chunks])
        return dict(zip((rows.uid for rows in pooled_rows), sums_BE.cpu().numpy(), strict=True))

    def attention_weights(self, token_ids: Sequence[int], *, layer: int, heads: Sequence[int]) -> bytes:
        """What these tokens attend to: lower triangles of the `heads`, float32. Touches no cache.

        Raises:
            ValueError: see `weights_of_layer`.
        """
        held_as = self._cache.held_as
        weights_HTT = weights_of_layer(self._model, token_ids, layer=layer, held_as=held_as)[list(heads)]
        rows, columns = torch.tril_indices(len(token_ids), len(token_ids))
        return weights_HTT[:, rows, columns].numpy().tobytes()


class _Draws:
    """Sampled ids and `_sums` on their way to the host: nothing waits for the copies until they are read."""

    def __init__(self, drawn_B: Tensor, sums_T: Tensor) -> None:
        self._ids_B, self._sums_T, self._copied = drawn_B, sums_T, None
        if drawn_B.is_cuda:
            self._ids_B, self._sums_T = _pinned(drawn_B), _pinned(sums_T)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> StepOutputs:
        """See `Launched`."""
        if self._copied is not None:
            self._copied.synchronize()
        non_finite = frozenset(_non_finite(self._sums_T))
        return StepOutputs(token_ids=self._ids_B.tolist(), logprobs=[], prompt_logprobs={}, non_finite=non_finite)


def _pinned(x: Tensor) -> Tensor:
    """A copy in the host's memory, which the device makes later."""
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return copy.copy_(x, non_blocking=True)


def _sums(x_TE: Tensor, logits_RV: Tensor, rows_R: Tensor | None) -> Tensor:
    """The sum of each packed token's hidden state and logits, T: finite where all of these numbers are.

    A sum costs one pass where they are, and the host waits for nothing. A hidden state of finite numbers whose sum
    overflows (over 1e34 each) is one that no norm can take either.
    """
    sums_T = x_TE.sum(dim=1, dtype=torch.float32)
    of_logits_R = logits_RV.sum(dim=1, dtype=torch.float32)
    return sums_T + of_logits_R if rows_R is None else sums_T.index_add_(0, rows_R.to(sums_T.device), of_logits_R)


def _non_finite(sums_T: Tensor) -> set[int]:
    """The packed tokens whose sum, on the host, is NaN or infinite."""
    return set(np.flatnonzero(~np.isfinite(sums_T.numpy())).tolist())


def _draw(logits_RV: Tensor, inputs: ModelInputs, likely: list[int] | None) -> Sequence[int | None]:
    """A token for each of the first rows that are drawn from; None where the request leaves none.

    likely: each row's most likely token, where that is known.
    """
    count = len(inputs.params)
    logits_BV = logits_RV if len(logits_RV) == count else logits_RV[:count]
    if inputs.all_greedy and not inputs.forbidden and not inputs.rules and inputs.masks is None:
        return most_likely(logits_BV) if likely is None else likely
    without_token: list[int] = []
    if inputs.masks is not None:
        rows, allowed_RV = inputs.masks.rows, torch.from_numpy(inputs.masks.allowed())
        logits_BV = only_allowed(logits_BV, rows, allowed_RV)
        without_token = [row for row, some in zip(rows, allowed_RV.any(dim=1).tolist(), strict=True) if not some]
    ids = sample(logits_BV, inputs.params, inputs.positions, forbidden=inputs.forbidden, rules=inputs.rules)
    drawn = [None if token_id == NO_TOKEN else token_id for token_id in ids]
    for row in without_token:
        drawn[row] = None
    return drawn


def _drawn_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int | None], params: Sequence[SamplingParams]
) -> list[TokenLogprob | None]:
    """Log-probabilities of the drawn tokens whose sequences asked for them."""
    asked = {row: token_ids[row] for row, param in enumerate(params) if param.logprobs is not None}
    entries: list[TokenLogprob | None] = [None] * len(params)
    known = {row: token_id for row, token_id in asked.items() if token_id is not None}
    if known:
        num_top = max(params[row].logprobs or 0 for row in known)
        found = _token_logprobs(logits_RV[list(known)], list(known.values()), num_top)
        for row, entry in zip(known, found, strict=True):
            wanted = params[row].logprobs or 0
            entries[row] = msgspec.structs.replace(entry, top=entry.top[:wanted])
    return entries


def _token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    found = top_logprobs(logits_RV, token_ids, num_top)
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
        for token_id, (logprob, rank, top) in zip(token_ids, found, strict=True)
    ]
