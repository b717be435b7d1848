"""Transformer computed by native kernels on CPUs.

With native attention, all layers are one C call, and a decode step with its logits is one C call too. With another
attention backend, one C call runs between consecutive attention layers. The logits are one more call.

`NativeTransformer` is made from the matrices of a `model.nn.transformer.Transformer` and agrees with it within
rounding: here the residual stream and the values between two matrices stay float32. Every output of a matrix is one sum
over its inputs in a fixed order. A row's result is therefore bitwise identical for any number of rows and threads.

Legend: T packed tokens, R rows whose logits are wanted, E hidden size, F outputs and I inputs of a matrix, H query
heads, K key/value heads, D head dimension, X queries, keys and values side by side, V vocabulary.
"""

import ctypes
import os
import threading
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.config import ModelConfig
from model.config_enums import AttentionKind
from model.kernels.ctypes_structs import Decode, LayerWeights, Matrix, Rows
from model.kernels.kernel_library import KernelLibrary
from model.native.decode_call import AttentionCalls, DecodeCall, Decoded
from model.native.weight_packing import NUMBERS, pack, padded, shape_of
from model.nn.layers import GatedMlp, LayerNorm, RMSNorm
from model.nn.transformer import Block, Transformer
from model.system.c_library import trim_heap
from model.system.memory_pages import HugePages

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
# Limit of the kernels: numbers in a row of a thread's scratch memory, see layers.cpp.
_MOST_NUMBERS = 65_536
# Of the thread that moves matrices to large pages: on a busy processor it gets a tenth of the time.
_NICENESS = 10


def computes(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Return whether the native kernels compute every part of a model with this config and dtype on a CPU."""
    widths = (config.hidden_size, config.mlp_size, config.num_heads * config.head_dim)
    return (
        dtype in (torch.float32, torch.bfloat16)
        and config.attention is AttentionKind.SOFTMAX
        and max(widths) <= _MOST_NUMBERS
        and not any(width % 2 for width in widths)
    )


def library_for(model: Transformer) -> KernelLibrary | None:
    """Return the loaded kernel library that computes all of this model.

    Returns None if the model's attention uses another backend, or if the kernels do not support such a model.
    """
    backends = {cast(Block, block).attention.backend for block in model.layers}
    backend, weight = backends.pop(), model.token_embedding.weight
    is_native = not backends and isinstance(backend, NativeAttention)
    if not is_native or weight.device.type != "cpu" or not computes(model.config, weight.dtype):
        return None
    return cast(NativeAttention, backend).library


def to_native(model: "Transformer | NativeTransformer") -> "Transformer | NativeTransformer":
    """Return a `NativeTransformer` if the native kernels compute all of this model, else the model itself.

    The model's matrices are packed and freed one by one, so at most one matrix is in memory twice. A low-priority
    thread moves the packed matrices to pages of 2 MiB while the model already serves.
    """
    if isinstance(model, NativeTransformer) or (library := library_for(model)) is None:
        return model
    model.requires_grad_(False)
    native = NativeTransformer(model, library)
    trim_heap()

    def enlarge() -> None:
        with suppress(OSError, AttributeError):  # no thread priorities on this system
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        native.enlarge_pages()

    threading.Thread(target=enlarge, name="large-pages", daemon=True).start()
    return native


class NativeTransformer:
    """Replacement for the `Transformer` that it is made from, whose matrices are freed as they are packed.

    Args:
        library: the kernels.

    Raises:
        ValueError: the kernels do not support such a model, see `computes`.
    """

    def __init__(self, model: Transformer, library: KernelLibrary) -> None:
        if model.token_embedding.weight.device.type != "cpu" or not computes(
            model.config, model.token_embedding.weight.dtype
        ):
            raise ValueError("the native kernels do not support this model; keep its Transformer")
        self.config = model.config
        self.token_embedding, self.final_norm, self.layers = model.token_embedding, model.final_norm, model.layers
        self._model, self._dtype = model, model.token_embedding.weight.dtype
        self._between = library.function("kvasir_between_attentions", *[_POINTER] * 5)
        self._all_layers = library.function("kvasir_layers", *[_POINTER] * 3, _INT, *[_POINTER] * 4)
        self._decode = library.function("kvasir_decode", _POINTER, result=ctypes.c_bool)
        self._library = library
        self._logits = library.function("kvasir_logits", *[_POINTER] * 6)
        self._are_tokens = library.function("kvasir_are_tokens", _POINTER, _INT, _INT, result=ctypes.c_bool)
        self._side_by_side = library.function("kvasir_inputs_side_by_side", _INT, result=_INT)
        self._kept: list[Tensor] = []  # keeps the memory behind the pointers alive
        self._huge_pages = HugePages()
        self._shape = shape_of(model.config, self._dtype)
        self._head = self._matrix(model.token_embedding if model.lm_head is None else model.lm_head)
        self._head_norm = self._norm(model.final_norm)
        self._layers = (LayerWeights * len(model.layers))()
        for number, block in enumerate(model.layers):
            self._layers[number] = self._layer(cast(Block, block))
            _free_matrices(cast(Block, block))
        model.lm_head = None
        self._rows = Rows(embedding=self._embedding())
        self._buffers: dict[str, Tensor] = {}
        self._capacity = 0
        self._calls: AttentionCalls | None = None
        self._decodes: DecodeCall | None = None
        self._rotations = (torch.empty(0), torch.empty(0))

    @property
    def kernel_level(self) -> str:
        """Return the instruction-set level of the kernels."""
        return self._library.level

    def enlarge_pages(self) -> None:
        """Move the matrices to pages of 2 MiB, see `HugePages.enlarge`.

        Meant for a background thread: the model can serve meanwhile.
        """
        self._huge_pages.enlarge()

    def __call__(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """See `Transformer.forward`."""
        x_TE = self.hidden(token_ids_T, metadata, kv_cache)
        return self.logits(x_TE if metadata.logit_rows_R is None else x_TE[metadata.logit_rows_R])

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """Return the last layer's output before the final norm, TE float32; valid until the next call."""
        count = len(token_ids_T)
        self._grow_buffers(count)
        x_TE = self._buffers["x"][:count, : self.config.hidden_size]
        token_ids_T, positions_T = token_ids_T.contiguous(), metadata.positions_T.contiguous()
        rows = self._rows
        rows.tokens = token_ids_T.data_ptr()
        if rows.embedding is None or not self._are_tokens(rows.tokens, count, self.config.vocab_size):
            x_TE.copy_(self._model.embed(token_ids_T, positions_T))
        rows.count, rows.threads, rows.x = count, torch.get_num_threads(), self._buffers["x"].data_ptr()
        rows.cosines, rows.sines = (table.data_ptr() for table in self._rotations_of(max(metadata.context_lengths)))
        rows.positions = positions_T.data_ptr()
        if kv_cache is None or not self._attend_inside(metadata, kv_cache):
            self._attend_outside(count, metadata, kv_cache)
        return x_TE

    def _attend_outside(self, count: int, metadata: AttentionMetadata, kv_cache: KVCache | None) -> None:
        """Compute all layers, each with its own attention backend, with one kernel call between two attentions."""
        q_THD, k_TKD, v_TKD = self._heads(count)
        shared = ctypes.byref(self._shape), ctypes.byref(self._rows)
        done, mixed = None, None
        for block, layer in zip(self.layers, self._layers, strict=True):
            following = ctypes.addressof(layer)
            self._between(*shared, done, mixed, following)
            attention = cast(Block, block).attention
            mixed_THD = attention.backend.attend(
                q_THD, k_TKD, v_TKD, form=attention.form, metadata=metadata, kv_cache=kv_cache
            ).contiguous()
            done, mixed = following, mixed_THD.data_ptr()
        self._between(*shared, done, mixed, None)

    def _attend_inside(self, metadata: AttentionMetadata, kv_cache: KVCache) -> bool:
        """Compute all layers in one call.

        Returns False and computes nothing if a layer's attention is not computed by the same native kernels.
        """
        calls = self._calls_over(kv_cache)
        step = None if calls.backend is None else calls.backend.step_of(metadata, kv_cache)
        if step is None or step.library is not self._library:
            return False
        calls.use(step.threads)
        self._all_layers(
            *(ctypes.byref(self._shape), ctypes.byref(self._rows), self._layers, len(self._layers)),
            *(calls.kernel, ctypes.byref(step.batch), calls.layers, self._buffers["mixed"].data_ptr()),
        )
        return True

    def decode(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, *, num_ids: int
    ) -> Decoded | None:
        """Compute one decode step, one token per sequence, in a single call; the result is valid until the next call.

        Pass the same tensors in every step, updated in place: the prepared call is then reused.

        Args:
            metadata: must have `contexts_B` and a cache's slots and blocks; logits are computed for all rows.
            num_ids: return logits of this many tokens, from the start of the vocabulary.

        Returns None, having computed nothing, if the caller must use `hidden` and `logits` instead.

        Raises:
            ValueError: a slot or a block is outside the cache.
        """
        call = self._decodes
        if call is None or not call.is_of(token_ids_T, metadata, kv_cache, num_ids):
            call = self._decodes = self._make_decode(token_ids_T, metadata, kv_cache, num_ids)
        if call is None:
            return None
        if call.rows.embedding is None:
            x_TE = self._buffers["x"][: len(token_ids_T), : self.config.hidden_size]
            x_TE.copy_(self._model.embed(token_ids_T, metadata.positions_T))
        if not self._decode(call.reference):
            self._decodes = None
            return None
        return call.decoded()

    def _make_decode(
        self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, num_ids: int
    ) -> DecodeCall | None:
        count = len(token_ids_T)
        self._grow_buffers(count)
        calls, contexts_B = self._calls_over(kv_cache), metadata.contexts_B
        step = None if calls.backend is None or contexts_B is None else calls.backend.step_of(metadata, kv_cache)
        if step is None or step.library is not self._library:
            return None
        calls.use(step.threads)
        rotations = self._rotations_of(step.longest)
        rows = Rows.from_buffer_copy(self._rows)
        rows.count, rows.threads, rows.x = count, step.threads, self._buffers["x"].data_ptr()
        rows.tokens, rows.positions = token_ids_T.data_ptr(), metadata.positions_T.data_ptr()
        rows.cosines, rows.sines = (table.data_ptr() for table in rotations)
        logits_BV = torch.empty(count, self._head.outputs)
        ids = (ctypes.c_int64 * count)()
        decode = Decode(
            *(ctypes.addressof(x) for x in (self._shape, rows, self._layers)),
            len(self._layers),
            self.config.max_context_length if self._model.rotary is None else len(rotations[0]),
            self.config.vocab_size,
            calls.kernel,
            *(ctypes.addressof(x) for x in (step.batch, calls.layers)),
            self._buffers["mixed"].data_ptr(),
            ctypes.addressof(self._head),
            *self._head_norm,
            logits_BV.data_ptr(),
            ctypes.addressof(ids),
            num_ids,
        )
        return DecodeCall(
            decode=decode,
            rows=rows,
            token_ids_T=token_ids_T,
            metadata=metadata,
            kv_cache=kv_cache,
            logits_BV=logits_BV[:, :num_ids],
            ids=ids,
            held=(step, calls, rotations, logits_BV),
        )

    def _calls_over(self, kv_cache: KVCache) -> AttentionCalls:
        """Return the prepared attention calls of all layers over this cache and the current buffers."""
        if self._calls is None or self._calls.kv_cache is not kv_cache:
            attentions = [cast(Block, block).attention for block in self.layers]
            heads, mixed = self._heads(self._capacity), self._buffers["mixed"]
            self._calls = AttentionCalls.of(attentions, heads, mixed, kv_cache, self._library)
        return self._calls

    def logits(self, x_RE: Tensor) -> Tensor:
        """Return next-token logits of rows of `hidden`, RV float32."""
        count, size = x_RE.shape
        self._grow_buffers(count)
        x_RE = (functional.pad(x_RE, (0, padded(size) - size)) if size < padded(size) else x_RE).contiguous()
        rows = self._rows
        rows.count, rows.threads, rows.x = count, torch.get_num_threads(), x_RE.data_ptr()
        logits_RV = torch.empty(count, self._head.outputs)
        shared = ctypes.byref(self._shape), ctypes.byref(rows)
        self._logits(*shared, ctypes.byref(self._head), *self._head_norm, logits_RV.data_ptr())
        return logits_RV[:, : self.config.vocab_size]

    def _heads(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the buffer into which the kernels write each layer's queries THD, keys TKD and values TKD."""
        config = self.config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_TX = self._buffers["qkv"][:count, : query + 2 * key]
        parts = torch.split(qkv_TX, [query, key, key], dim=1)
        q_THD, k_TKD, v_TKD = (torch.unflatten(part, 1, (-1, config.head_dim)) for part in parts)
        return q_THD, k_TKD, v_TKD

    def _rotations_of(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of at least all positions under `length`; empty tables without rotary positions.

        One thread computes them. PyTorch's first cosine in a process that two threads share can be off by one unit in
        the last place in one thread's part (3 of 40 processes), and a replacement worker would then compute other bits.
        """
        rotary = self._model.rotary
        if rotary is not None and length > len(self._rotations[0]):
            half, num_threads = self.config.rotary_size // 2, torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                cosines, sines = rotary(torch.arange(max(256, 2 * length)))
            finally:
                torch.set_num_threads(num_threads)
            self._rotations = cosines[:, 0, :half].contiguous(), sines[:, 0, :half].contiguous()
        return self._rotations

    def _grow_buffers(self, count: int) -> None:
        """Grow the buffers to at least `count` rows."""
        if count <= self._capacity:
            return
        config, dtype = self.config, self._dtype
        hidden, mlp = padded(config.hidden_size), padded(config.mlp_size)
        mixed = padded(config.num_heads * config.head_dim)
        widest = max(hidden, mlp, mixed)
        with torch.inference_mode(False):  # else a first call in inference mode makes them read-only outside it
            self._buffers = {
                "x": torch.zeros(count, hidden),
                "added": torch.zeros(count, hidden),
                "qkv": torch.zeros(count, self._layers[0].qkv.outputs, dtype=dtype),
                "mixed": torch.zeros(count, config.num_heads * config.head_dim, dtype=dtype),
                "wide": torch.zeros(count, max(hidden + mlp, mixed)),
                "narrow": torch.zeros(count, widest, dtype=torch.uint8),
                "scales": torch.zeros(count),
            }
        for name, buffer in self._buffers.items():
            if name != "mixed":
                setattr(self._rows, name, buffer.data_ptr())
        self._capacity, self._calls, self._decodes = count, None, None

    def _embedding(self) -> int | None:
        """Return a pointer to the embedding matrix if the first layer's input is its rows alone, else None."""
        model, weight_VE = self._model, self.token_embedding.weight
        is_all = self.config.embedding_scale == 1.0 and model.position_embedding is None and weight_VE.is_contiguous()
        return weight_VE.data_ptr() if is_all else None

    def _layer(self, block: Block) -> LayerWeights:
        """Return pointers to one layer's packed matrices and norms. The caller frees the matrices in the model."""
        attention, mlp = block.attention, block.mlp
        gated = isinstance(mlp, GatedMlp)
        layer = LayerWeights(
            qkv=self._matrix(attention.qkv),
            out=self._matrix(attention.out),
            up=self._matrix(mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up, gated=gated),
            down=self._matrix(mlp.down),
            query_norm=self._norm(attention.query_norm)[0],
            key_norm=self._norm(attention.key_norm)[0],
        )
        layer.attention_norm, layer.attention_norm_bias = self._norm(block.attention_norm)
        layer.mlp_norm, layer.mlp_norm_bias = self._norm(block.mlp_norm)
        return layer

    def _matrix(self, module: nn.Module, *, gated: bool = False) -> Matrix:
        packed = pack(module, self._side_by_side, gated=gated)
        tensors = (self._huge_pages.keep(packed.weight), *packed.tensors[1:])
        self._kept += [tensor for tensor in tensors if tensor is not None]
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return Matrix(*pointers, packed.inputs, packed.outputs, NUMBERS[packed.weight.dtype])

    def _norm(self, norm: RMSNorm | LayerNorm | None) -> tuple[int | None, int | None]:
        """Return pointers to the norm's weight and bias, both float32."""
        if norm is None:
            return None, None
        bias_E = norm.bias if isinstance(norm, LayerNorm) else None
        offset = 1.0 if isinstance(norm, RMSNorm) and norm.unit_offset else 0.0
        kept = [norm.weight.detach().float() + offset] + ([] if bias_E is None else [bias_E.detach().float()])
        self._kept += kept
        return kept[0].data_ptr(), None if bias_E is None else kept[1].data_ptr()


def _free_matrices(block: Block) -> None:
    for module, name in ((block.attention, "qkv"), (block.attention, "out"), (block, "mlp")):
        if hasattr(module, name):
            delattr(module, name)
