"""Model runner: forward passes and sampling, with the model and the KV-cache tensors."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

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
from model.sampling.sampler import (
    NO_TOKEN,
    logprob_table,
    most_likely,
    read_logprobs,
    sample,
    sampling_arrays,
)
from model.system.device_copy import copy_to_device, readable_by
from model.system.limits import usable_cpus
from service.engine.execution.adapted_linear import LinearAdapters, adapter_tokens
from service.engine.execution.cuda_graphs import Bucket, Capture, DecodeGraphs, buckets
from service.engine.execution.model_inputs import ModelInputs
from service.engine.scheduling.step_plan import MIN_ROWS, Chunk
from service.ipc.messages import TokenLogprob

logger = logging.getLogger(__name__)
# Minimum number of CPUs with which the engine's thread spins: it then gets results some 10 µs earlier.
_SPINNING_CPUS = 4


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
        arrays = self._sampling_arrays(inputs) if self.is_asynchronous else []
        _, logits_RV, sums_T, tensors = self._compute(inputs, arrays)
        self._sampled_B = _sample(logits_RV, inputs, self._kernels, tensors)
        wait = _copy_to_host([self._sampled_B, sums_T])

        def read() -> StepOutputs:
            ids_B, sums_T = wait()
            return StepOutputs(token_ids=ids_B.tolist(), non_finite=frozenset(_non_finite(sums_T)))

        return read

    def _sampling_arrays(self, inputs: ModelInputs) -> list[NDArray[Any]]:
        """Return the arrays that sampling needs on a GPU. On a CPU, sampling makes them itself."""
        vocab_size = min(self._vocab_size, self._model.config.vocab_size)
        mask_of_B = np.full(0 if inputs.masks is None else len(inputs.params), -1, dtype=np.int64)
        if inputs.masks is not None:
            mask_of_B[list(inputs.masks.rows)] = range(len(inputs.masks.rows))
        sampling = sampling_arrays(
            vocab_size, inputs.params, inputs.positions, forbidden=inputs.forbidden, rules=inputs.rules
        )
        return [mask_of_B, *sampling]

    def _compute(
        self, inputs: ModelInputs, arrays: Sequence[NDArray[Any]]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Run the model on a step's inputs, after one copy to its device of the inputs and of other arrays.

        Return the hidden states TE, the requested logits RV, their `_sums`, and the tensors of the arrays.
        """
        metadata, rows_R, graphs = inputs.metadata, inputs.metadata.logit_rows_R, self._graphs
        given = [np.array(inputs.previous_rows, dtype=np.int64), *arrays]
        if graphs is None or inputs.adapters or (bucket := graphs.bucket(metadata)) is None:
            adapters = {} if isinstance(self._model, NativeTransformer) else adapter_tokens(inputs.adapters)
            given = [inputs.token_ids_T.numpy(), *given, *adapters.values()]
            metadata, (token_ids_T, previous_B, *tensors) = metadata.to_device(self._device, given)
            tensors, tokens = tensors[: len(arrays)], dict(zip(adapters, tensors[len(arrays) :], strict=True))
            rows_R = metadata.logit_rows_R
            if (sampled_B := self._previous(inputs, previous_B)) is not None:
                token_ids_T = torch.cat((sampled_B, token_ids_T[len(sampled_B) :]))
            x_TE = self._hidden(token_ids_T, metadata, inputs.adapters, tokens)
        else:
            given += [] if rows_R is None else [rows_R.numpy()]
            previous_B, *tensors = graphs.fill(bucket, inputs, given)
            rows_R = None if rows_R is None else tensors.pop()
            x_TE = graphs.replay(bucket, len(inputs.token_ids_T), self._previous(inputs, previous_B))
        logits_RV = self._model.logits(x_TE if rows_R is None else x_TE.index_select(0, rows_R))
        if logits_RV.shape[1] > self._vocab_size:
            logits_RV = logits_RV[:, : self._vocab_size]
        return x_TE, logits_RV, _sums(x_TE, logits_RV, rows_R), tensors

    def _previous(self, inputs: ModelInputs, rows_B: Tensor) -> Tensor | None:
        """Return a step's first input tokens if the previous step has sampled them and the host has not read them.

        None: the host knows all input tokens. rows_B: `inputs.previous_rows`, on the device.
        """
        if not inputs.previous_rows or self._sampled_B is None:
            return None
        is_same = inputs.previous_rows == tuple(range(len(self._sampled_B)))
        return self._sampled_B if is_same else self._sampled_B[rows_B]

    def _hidden(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        runs: tuple[tuple[str, int], ...],
        tokens: Mapping[str, Tensor],
    ) -> Tensor:
        """Return the hidden states TE of a step. runs: `ModelInputs.adapters`. tokens: their indices, by adapter."""
        if isinstance(self._model, NativeTransformer):
            rows = cast(NativeAdapters, self.adapters).rows(runs, len(token_ids_T))
            return self._model.hidden(token_ids_T, metadata, self._cache, rows)
        with cast(LinearAdapters, self.adapters).applied(tokens):
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
        arrays = _logprob_arrays(inputs) if inputs.wants_logprobs or inputs.prompt_rows else []
        tables, sums_BE = list[Tensor](), list[Tensor]()
        if decoded is None:
            sampling = self._sampling_arrays(inputs) if self.is_asynchronous else []
            x_TE, logits_RV, sums_T, tensors = self._compute(inputs, [*sampling, *arrays])
            # The device reads this memory, until the results have arrived, which this method waits for.
            words_RW = _mask_words(inputs, self._device)
            ids_B = _sample(logits_RV, inputs, self._kernels, tensors[: len(sampling)], words_RW)
            found = _logprob_tables(logits_RV, ids_B, inputs, tensors[len(sampling) :]) if arrays else ()
            results = [ids_B, sums_T, *found, *self._pool(x_TE, inputs.pooled_rows)]
            ids_B, sums_T, *tables = _copy_to_host(results)() if self.is_asynchronous else results
            tables, sums_BE = tables[: len(arrays)], tables[len(arrays) :]
            token_ids, non_finite = ids_B.tolist(), _non_finite(sums_T)
        else:
            likely, logits_RV = decoded
            token_ids = likely
            if not _is_plain_greedy(inputs):
                words_RW = _mask_words(inputs, self._device)
                token_ids = _sample(logits_RV, inputs, self._kernels, (), words_RW).tolist()
            if arrays:
                tensors = copy_to_device(self._device, arrays)
                tables = list(_logprob_tables(logits_RV, torch.tensor(token_ids), inputs, tensors))
            non_finite = {row for row, token_id in enumerate(likely) if token_id < 0} if min(likely) < 0 else set()
        token_ids = [None if token_id == NO_TOKEN else token_id for token_id in token_ids]
        if inputs.masks is not None:
            for row, words_W in zip(inputs.masks.rows, inputs.masks.words.result(), strict=True):
                if not words_W.any():
                    token_ids[row] = None
        for (_, row), sums_E in zip(inputs.pooled_rows, sums_BE, strict=True):
            if not sums_E.isfinite().all():
                non_finite.add(row)
        logprobs = _sampled_logprobs(inputs, token_ids, tables.pop(0)) if inputs.wants_logprobs else []
        prompts = zip(inputs.prompt_rows, tables, strict=True)
        return StepOutputs(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs={chunk.uid: _entries(chunk.scored_ids, table) for (chunk, _), table in prompts},
            pooled={chunk.uid: sums_E.numpy() for (chunk, _), sums_E in zip(inputs.pooled_rows, sums_BE, strict=True)},
            non_finite=frozenset(non_finite),
        )

    @property
    def is_asynchronous(self) -> bool:
        """True if the model is on a GPU: the host is free while a launched step is computed."""
        return self._device.type == "cuda"

    def _pool(self, x_TE: Tensor, pooled_rows: Sequence[tuple[Chunk, int]]) -> list[Tensor]:
        """Return, for each chunk, the sum E of hidden states after the final norm over its tokens that are pooled."""
        chunks = (x_TE[row : row + chunk.num_pooled] for chunk, row in pooled_rows)
        return [self._model.final_norm(chunk_XE).double().sum(dim=0) for chunk_XE in chunks]

    def attention_weights(self, token_ids: Sequence[int], *, layer: int, heads: Sequence[int]) -> bytes:
        """Return a text's attention weights in a layer: each head's lower triangle, float32 bytes. Uses no KV-cache."""
        cache_dtype = self._cache.cache_dtype
        weights_HTT = weights_of_layer(self._model, token_ids, layer=layer, cache_dtype=cache_dtype)[list(heads)]
        rows, columns = torch.tril_indices(len(token_ids), len(token_ids))
        return weights_HTT[:, rows, columns].numpy().tobytes()


def _copy_to_host(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Start one asynchronous copy of all tensors to the host. Return a function that waits for the copy.

    Integers arrive as int64, and other numbers as float64.
    """
    if tensors[0].is_cpu:
        return lambda: tensors
    parts = [x.double().view(torch.int64) if x.is_floating_point() else x for x in tensors]
    packed = torch.cat([part.flatten() for part in parts])
    host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True).copy_(packed, non_blocking=True)
    copied = torch.cuda.Event(blocking=_sleeps())
    copied.record()

    def wait() -> Sequence[Tensor]:
        copied.synchronize()
        arrived = zip(tensors, host.split([x.numel() for x in tensors]), strict=True)
        return [(y.view(torch.float64) if x.is_floating_point() else y).view(x.shape) for x, y in arrived]

    return wait


@functools.cache
def _sleeps() -> bool:
    """Return whether the host sleeps while it waits for a GPU. Else it spins, which needs a CPU of its own."""
    return usable_cpus() < _SPINNING_CPUS


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


def _mask_words(inputs: ModelInputs, device: torch.device) -> Tensor | None:
    """Wait for the words of a step's grammar masks, and return them for `mask_logits`; None if it has no masks."""
    return None if inputs.masks is None else readable_by(device, inputs.masks.words.result())


def _sample(
    logits_RV: Tensor,
    inputs: ModelInputs,
    kernels: KernelLibrary | None,
    tensors: Sequence[Tensor] = (),
    words_RW: Tensor | None = None,
) -> Tensor:
    """Sample one token per entry of `inputs.params`. A row without an allowed token gets any id or `NO_TOKEN`.

    tensors: `ModelRunner._sampling_arrays` of the inputs on a GPU; empty on a CPU. words_RW: `_mask_words`.
    """
    logits_BV = logits_RV[: len(inputs.params)]
    if _is_plain_greedy(inputs):
        return torch.as_tensor(most_likely(logits_BV))
    if inputs.masks is not None and words_RW is not None:
        logits_BV = mask_logits(logits_BV, inputs.masks.rows, words_RW, tensors[0] if tensors else None)
    return sample(
        *(logits_BV, inputs.params, inputs.positions),
        forbidden=inputs.forbidden, rules=inputs.rules, kernels=kernels, tensors=tensors[1:],
    )  # fmt: skip


def _rows_with_logprobs(inputs: ModelInputs) -> list[int]:
    return [row for row, param in enumerate(inputs.params) if param.logprobs is not None]


def _logprob_arrays(inputs: ModelInputs) -> list[NDArray[Any]]:
    """Return the arrays for `_logprob_tables`: rows whose sampled token needs logprobs; token ids of each prompt."""
    sampled = [np.array(_rows_with_logprobs(inputs))] if inputs.wants_logprobs else []
    return [*sampled, *(np.array(chunk.scored_ids) for chunk, _ in inputs.prompt_rows)]


def _logprob_tables(
    logits_RV: Tensor, ids_B: Tensor, inputs: ModelInputs, tensors: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Return the `logprob_table` of sampled tokens, if any, and of each prompt. tensors: `_logprob_arrays`."""
    if inputs.wants_logprobs:
        rows_X, *tensors = tensors
        num_top = max(param.logprobs or 0 for param in inputs.params)
        yield logprob_table(logits_RV[rows_X], ids_B[rows_X].clamp(min=0), num_top)
    for (chunk, row), ids_X in zip(inputs.prompt_rows, tensors, strict=True):
        yield logprob_table(logits_RV[row : row + len(ids_X)], ids_X, chunk.params.prompt_logprobs or 0)


def _entries(token_ids: Sequence[int | None], table: Tensor) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
        for token_id, (logprob, rank, top) in zip(token_ids, read_logprobs(table), strict=True)
        if token_id is not None
    ]


def _sampled_logprobs(inputs: ModelInputs, token_ids: Sequence[int | None], table: Tensor) -> list[TokenLogprob | None]:
    """Return the logprob of each sampled token; None if its request asks for no logprobs, or no token was sampled."""
    entries: list[TokenLogprob | None] = [None] * len(token_ids)
    rows = _rows_with_logprobs(inputs)
    known = [row for row in rows if token_ids[row] is not None]
    for row, entry in zip(known, _entries([token_ids[row] for row in rows], table), strict=True):
        entries[row] = msgspec.structs.replace(entry, top=entry.top[: inputs.params[row].logprobs or 0])
    return entries
