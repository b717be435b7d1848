"""Model runner: forward passes and sampling, with the model and the KV-cache tensors."""

import logging
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.inspect.attention_weights import weights_of_layer
from model.kernels.kernel_library import KernelLibrary
from model.native.native_adapters import NativeAdapters
from model.native.native_transformer import Decoded, NativeTransformer, to_native
from model.nn.transformer import Transformer
from model.sampling.logits_processors import mask_logits
from model.sampling.params import SamplingParams
from model.sampling.sampler import NO_TOKEN, most_likely, sample, top_logprobs
from model.system.device_copy import copy_to_device
from service.engine.execution.adapted_linear import LinearAdapters
from service.engine.execution.cuda_graphs import Bucket, Capture, DecodeGraphs, buckets
from service.engine.execution.model_inputs import ModelInputs
from service.engine.scheduling.step_plan import MIN_ROWS, Chunk
from service.ipc.messages import TokenLogprob

logger = logging.getLogger(__name__)


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Outputs of one step: a token for each of `ModelInputs.params`, requested logprobs, sums of hidden states."""

    token_ids: Sequence[int | None]  # None for a row whose request allows no next token
    logprobs: list[TokenLogprob | None] = []  # of each row; empty if no row of the step requests logprobs
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}  # uid to the prompt tokens scored in this step
    pooled: dict[str, NDArray[np.float64]] = {}  # uid to the sum of hidden states, E, of `ModelInputs.pooled_rows`
    # Indices of packed tokens with NaN or infinity, whose sampled tokens and logprobs are invalid.
    non_finite: frozenset[int] = frozenset()


class ModelRunner:
    """Runner of a transformer's forward passes over a KV-cache of `num_blocks` blocks and a scratch block for padding.

    vocab_size: only token ids below `vocab_size` are sampled. Embedding matrices are often padded beyond the
        tokenizer's vocabulary, and the ids of the padding have no text.
    """

    def __init__(
        self,
        model: Transformer | NativeTransformer,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._model = to_native(model)
        # Smaller steps are padded to this number of rows, because fewer rows would round differently.
        self.min_rows = 1 if isinstance(self._model, NativeTransformer) else MIN_ROWS
        self._kernels = self._model.kernels if isinstance(self._model, NativeTransformer) else None
        self._vocab_size = vocab_size
        weight = model.token_embedding.weight
        self._device = weight.device
        self._cache = KVCache(
            model.config,
            num_blocks=num_blocks + 1,
            block_size=block_size,
            dtype=weight.dtype,
            device=weight.device,
            cache_dtype=cache_dtype,
        )
        self.adapters: NativeAdapters | LinearAdapters
        if isinstance(self._model, NativeTransformer):
            self.adapters = NativeAdapters(model.config, self._model.adapter_dtype)
        else:
            self.adapters = LinearAdapters(self._model)
        self._graphs: DecodeGraphs | None = None
        self._sampled_B: Tensor | None = None  # sampled by the step launched last, on its device

    @torch.inference_mode()
    def capture_decodes(self, capture: Capture, *, max_rows: int, max_context_length: int) -> tuple[Bucket, ...]:
        """Capture decode steps as CUDA graphs before the first step, and return the captured shapes."""
        shapes = buckets(max_rows, -(-max_context_length // self._cache.block_size))
        self._graphs = DecodeGraphs(self._model.hidden, self._cache, capture=capture, shapes=shapes)
        logger.info(
            "CUDA graphs captured for decode steps of up to %d sequences (%d shapes)", shapes[0].rows, len(shapes)
        )
        return shapes

    @torch.inference_mode()
    def launch(self, inputs: ModelInputs) -> Callable[[], StepOutputs]:
        """Launch a step, to be computed after the steps launched before. Return a function that waits for its outputs.

        The step must not need token rules, grammar masks or logprobs. The caller may overwrite the inputs once
        `launch` returns.
        """
        _, logits_RV, sums_T = self._compute(inputs)
        self._sampled_B = sample(logits_RV[: len(inputs.params)], inputs.params, inputs.positions)
        wait = _copy_to_host(self._sampled_B, sums_T)

        def read() -> StepOutputs:
            ids_B, sums_T = wait()
            return StepOutputs(token_ids=ids_B.tolist(), non_finite=frozenset(_non_finite(sums_T)))

        return read

    def _compute(self, inputs: ModelInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model on a step's inputs. Return the hidden states TE, the requested logits RV, and their `_sums`."""
        metadata, rows_R = inputs.metadata, inputs.metadata.logit_rows_R
        sampled_B = self._sampled_B if inputs.previous_rows else None
        if sampled_B is not None and inputs.previous_rows != tuple(range(len(sampled_B))):
            sampled_B = sampled_B[copy_to_device(self._device, [np.array(inputs.previous_rows)])[0]]
        x_TE = None if self._graphs is None or inputs.adapters else self._graphs.hidden(inputs, sampled_B)
        if x_TE is None:
            metadata, (token_ids_T,) = metadata.to_device(self._device, [inputs.token_ids_T])
            rows_R = metadata.logit_rows_R
            if sampled_B is not None:
                token_ids_T = torch.cat((sampled_B, token_ids_T[len(sampled_B) :]))
            x_TE = self._hidden(token_ids_T, metadata, inputs.adapters)
        elif rows_R is not None:
            (rows_R,) = copy_to_device(self._device, [rows_R.numpy()])
        logits_RV = self._model.logits(x_TE if rows_R is None else x_TE.index_select(0, rows_R))
        if logits_RV.shape[1] > self._vocab_size:
            logits_RV = logits_RV[:, : self._vocab_size]
        return x_TE, logits_RV, _sums(x_TE, logits_RV, rows_R)

    def _hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, runs: tuple[tuple[str, int], ...]) -> Tensor:
        """Return the hidden states TE of a step. `runs`: as `ModelInputs.adapters`."""
        if isinstance(self._model, NativeTransformer):
            rows = cast(NativeAdapters, self.adapters).rows(runs, len(token_ids_T))
            return self._model.hidden(token_ids_T, metadata, self._cache, rows)
        with cast(LinearAdapters, self.adapters).applied(runs):
            return self._model.hidden(token_ids_T, metadata, self._cache)

    def run(self, inputs: ModelInputs) -> StepOutputs:
        """Compute a step, wait for it, and return its outputs."""
        model = self._model
        decoded: Decoded | None = None
        if isinstance(model, NativeTransformer):  # without gradients; entering inference_mode costs as much as sampling
            if inputs.metadata.logit_rows_R is None:
                token_ids_T, rows = inputs.token_ids_T, None
                if inputs.adapters:
                    rows = cast(NativeAdapters, self.adapters).rows(inputs.adapters, len(token_ids_T))
                decoded = model.decode(
                    token_ids_T, inputs.metadata, self._cache, num_ids=self._vocab_size, adapters=rows
                )
            return self._run(inputs, decoded)
        with torch.inference_mode():
            return self._run(inputs, None)

    def _run(self, inputs: ModelInputs, decoded: Decoded | None) -> StepOutputs:
        """Run the model and sample. `decoded`: native kernels' result of a decode step, which replaces the run."""
        if decoded is None:
            x_TE, logits_RV, sums_T = self._compute(inputs)
            ids_B = _sample(logits_RV, inputs, self._kernels)
            if not ids_B.is_cpu:
                ids_B, sums_T = _copy_to_host(ids_B, sums_T)()
            token_ids, non_finite = ids_B.tolist(), _non_finite(sums_T)
        else:
            likely, logits_RV = decoded
            token_ids = likely if _is_plain_greedy(inputs) else _sample(logits_RV, inputs, self._kernels).tolist()
            x_TE = logits_RV  # unused: decode steps pool no hidden states
            non_finite = {row for row, token_id in enumerate(likely) if token_id < 0} if min(likely) < 0 else set()
        token_ids = [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
        if inputs.masks is not None:
            for row, allowed_V in zip(inputs.masks.rows, inputs.masks.allowed.result(), strict=True):
                if not allowed_V.any():
                    token_ids[row] = None
        pooled = self._pool(x_TE, inputs.pooled_rows) if inputs.pooled_rows else {}
        for chunk, row in inputs.pooled_rows:
            if not np.isfinite(pooled[chunk.uid]).all():
                non_finite.add(row)
        return StepOutputs(
            token_ids=token_ids,
            logprobs=_sampled_logprobs(logits_RV, token_ids, inputs.params) if inputs.wants_logprobs else [],
            prompt_logprobs={
                chunk.uid: _token_logprobs(
                    logits_RV[row : row + len(chunk.scored_ids)], chunk.scored_ids, chunk.params.prompt_logprobs or 0
                )
                for chunk, row in inputs.prompt_rows
            },
            pooled=pooled,
            non_finite=frozenset(non_finite),
        )

    @property
    def is_asynchronous(self) -> bool:
        """True if the model is on a GPU: the host is free while a launched step is computed."""
        return self._device.type == "cuda"

    def _pool(self, x_TE: Tensor, pooled_rows: Sequence[tuple[Chunk, int]]) -> dict[str, NDArray[np.float64]]:
        """Return, by uid, the sum E of hidden states after the final norm, over a chunk's tokens that are pooled."""
        chunks = (x_TE[row : row + chunk.num_pooled] for chunk, row in pooled_rows)
        sums_BE = torch.stack([self._model.final_norm(chunk_XE).double().sum(dim=0) for chunk_XE in chunks])
        return dict(zip((chunk.uid for chunk, _ in pooled_rows), sums_BE.cpu().numpy(), strict=True))

    def attention_weights(self, token_ids: Sequence[int], *, layer: int, heads: Sequence[int]) -> bytes:
        """Return a text's attention weights in a layer: each head's lower triangle, float32 bytes. Uses no KV-cache."""
        cache_dtype = self._cache.cache_dtype
        weights_HTT = weights_of_layer(self._model, token_ids, layer=layer, cache_dtype=cache_dtype)[list(heads)]
        rows, columns = torch.tril_indices(len(token_ids), len(token_ids))
        return weights_HTT[:, rows, columns].numpy().tobytes()


def _copy_to_host(ids_B: Tensor, sums_T: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start one asynchronous copy of both tensors to the host. Return a function that waits for the copies."""
    if ids_B.is_cpu:
        return lambda: (ids_B, sums_T)
    packed = torch.cat((ids_B, sums_T.double().view(torch.int64)))
    host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True).copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> tuple[Tensor, Tensor]:
        copied.synchronize()
        return host[: len(ids_B)], host[len(ids_B) :].view(torch.float64)

    return wait


def _sums(x_TE: Tensor, logits_RV: Tensor, rows_R: Tensor | None) -> Tensor:
    """Return the sum over hidden state and logits of each packed token, T. NaN and infinity carry over to the sum."""
    sums_T, of_logits_R = _row_sums(x_TE), _row_sums(logits_RV)
    return sums_T + of_logits_R if rows_R is None else sums_T.index_add_(0, rows_R, of_logits_R)


def _row_sums(x_RN: Tensor) -> Tensor:
    # One pass on the device, without the host. Finite numbers whose sum overflows would overflow a norm too.
    if not x_RN.is_cpu or x_RN.dtype != torch.float32:
        return x_RN.sum(dim=1, dtype=torch.float32)
    # Not by PyTorch: its threads start late while the native kernels' threads still occupy the cores.
    with np.errstate(all="ignore"):
        return torch.from_numpy(x_RN.numpy().sum(axis=1))


def _non_finite(sums_T: Tensor) -> set[int]:
    """Return the indices of the packed tokens whose sum over hidden state and logits is NaN or infinite."""
    return set(np.flatnonzero(~np.isfinite(sums_T.numpy())).tolist())


def _is_plain_greedy(inputs: ModelInputs) -> bool:
    """Return whether each sampled token is the most likely token."""
    return inputs.all_greedy and not inputs.forbidden and not inputs.rules and inputs.masks is None


def _sample(logits_RV: Tensor, inputs: ModelInputs, kernels: KernelLibrary | None) -> Tensor:
    """Sample one token per entry of `inputs.params`. A row without an allowed token gets any id or `NO_TOKEN`."""
    logits_BV = logits_RV[: len(inputs.params)]
    if _is_plain_greedy(inputs):
        return torch.as_tensor(most_likely(logits_BV))
    if inputs.masks is not None:
        logits_BV = mask_logits(logits_BV, inputs.masks.rows, torch.from_numpy(inputs.masks.allowed.result()))
    return sample(
        logits_BV, inputs.params, inputs.positions, forbidden=inputs.forbidden, rules=inputs.rules, kernels=kernels
    )


def _sampled_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int | None], params: Sequence[SamplingParams]
) -> list[TokenLogprob | None]:
    """Return each row's logprob of the sampled token; None without a token, or if its request wants no logprobs."""
    asked = {row: token_ids[row] for row, param in enumerate(params) if param.logprobs is not None}
    entries: list[TokenLogprob | None] = [None] * len(params)
    known = {row: token_id for row, token_id in asked.items() if token_id is not None}
    if known:
        num_top = max(params[row].logprobs or 0 for row in known)
        (rows_R,) = copy_to_device(logits_RV.device, [np.array(list(known))])
        found = _token_logprobs(logits_RV[rows_R], list(known.values()), num_top)
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
