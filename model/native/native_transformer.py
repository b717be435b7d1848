"""Transformer computed by native kernels on CPUs.

With native attention, all layers are one C call, and a decode step with its logits is one C call too. The residual
stream stays float32. A row's result is bitwise identical for any number of rows and threads.

Legend: T packed tokens, R rows whose logits are computed, B sequences, E hidden size, H query heads, K key/value heads,
D head dimension, X queries, keys and values side by side, V vocabulary.
"""

import ctypes
import operator
import threading
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.native import (
    KERNEL_NAMES,
    AttentionStep,
    NativeAttention,
    layer_call,
    position_biases,
    set_biases,
    supports,
)
from model.config import ModelConfig
from model.config_enums import AttentionKind
from model.kernels.kernel_library import (
    AttentionCall,
    KernelLibrary,
    LayerInputWeights,
    LayerWeights,
    Matrix,
    Rows,
    StepArguments,
)
from model.native.native_adapters import AdapterRows
from model.native.weight_packing import NUMBERS, pack, padded, shape_of
from model.nn.layers import GatedMlp, LayerInputs, LayerNorm, RMSNorm, SparseMlp
from model.nn.linear import QuantizedEmbedding
from model.nn.position_embeddings import score_factors
from model.nn.transformer import Block, KeysValues, Transformer
from model.system.c_library import trim_heap
from model.system.memory_pages import HugePages

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_MAX_ROW_SIZE = 65_536  # size of a row in a thread's scratch memory: MAX_WIDTH in layers.cpp
_MAX_OVERREAD = 64  # numbers that the kernels read past the last layer's inputs: less than a panel of outputs


def computes(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Return whether `NativeTransformer` supports a model with this config and dtype.

    Needed: float32 or bfloat16, softmax attention, and widths (hidden, MLP, all heads together) that are even and at
    most `_MAX_ROW_SIZE`.
    """
    inputs, experts = config.layer_input_size or 0, 0 if config.experts is None else config.experts.mlp_size
    heads = {config.num_heads * config.head_dim_of(layer) for layer in range(config.num_layers)}
    widths = (config.hidden_size, config.largest_mlp_size, inputs, experts, *heads)
    return (
        dtype in (torch.float32, torch.bfloat16)
        and config.attention is AttentionKind.SOFTMAX
        and max(widths) <= _MAX_ROW_SIZE
        and not any(width % 2 for width in widths)
    )


def library_for(model: Transformer) -> KernelLibrary | None:
    """Return the kernel library of a model's attention backend; None if `to_native` cannot convert the model.

    A conversion needs one `NativeAttention` for all layers, weights on a CPU, and that `computes` returns True.
    """
    backends = {cast(Block, block).attention.backend for block in model.layers}
    backend, weight = backends.pop(), model.token_embedding.weight
    if backends or not isinstance(backend, NativeAttention) or weight.device.type != "cpu":
        return None
    return backend.kernels if computes(model.config, weight.dtype) else None


def to_native(model: "Transformer | NativeTransformer") -> "Transformer | NativeTransformer":
    """Convert a model to a `NativeTransformer`, and leave the given model unusable.

    If `library_for` finds no kernels for the model, return the model itself, unchanged. While the matrices are packed,
    at most one of them is in memory twice.
    """
    if isinstance(model, NativeTransformer) or (kernels := library_for(model)) is None:
        return model
    model.requires_grad_(False)
    native = NativeTransformer(model, kernels)
    trim_heap()
    return native


def enlarge_pages(model: "Transformer | NativeTransformer") -> None:
    """Move a native model's matrices to pages of 2 MiB, in a thread, while the model already serves."""
    if not isinstance(model, NativeTransformer):
        return

    # At normal priority: a low one would leave a busy server on small pages for half a minute. Not a daemon thread: at
    # exit, Python ends such a thread in the middle of a call, which can abort the process.
    threading.Thread(target=model.huge_pages.enlarge, name="large-pages").start()


class Decoded(NamedTuple):
    """Result of a decode step: the most likely token id of each sequence, and the float32 logits (sequences, ids).

    The logits are those of the first `num_ids` token ids, see `NativeTransformer.decode`. Of equal logits the first
    counts. The most likely id is -1 if a logit or a number of the sequence's hidden state is not finite.
    """

    ids: list[int]
    logits_BV: Tensor


class _PreparedDecode(NamedTuple):
    """Arguments of the C call for a decode step, reused by later steps with the same tensors, updated in place.

    inputs: the tensors and the KV-cache that the arguments point to.
    held: other owners of memory that the arguments point to.
    """

    inputs: tuple[object, ...]
    arguments: StepArguments
    rows: Rows
    logits_BV: Tensor
    ids: Any
    held: tuple[object, ...]


class _PackedEmbedding(nn.Embedding):
    """Embedding whose rows are unpacked from a packed matrix. Its `weight` is empty, and has the model's dtype."""

    def __init__(self, matrix: Matrix, kernels: KernelLibrary, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(0, 1, dtype=dtype)
        self._matrix, self._shape = matrix, (config.vocab_size, config.hidden_size)
        self._unpack = kernels.function("kvasir_unpack_rows", _POINTER, _POINTER, _INT, _POINTER)

    def forward(self, input: Tensor) -> Tensor:
        """Return each token's embedding: (tokens, hidden size). Raises IndexError for an id outside the vocabulary."""
        vocabulary, size = self._shape
        if len(input) and not 0 <= int(input.min()) <= int(input.max()) < vocabulary:
            raise IndexError(f"a token id is outside the vocabulary; use ids from 0 to {vocabulary - 1}")
        rows_TE, ids_T = torch.empty(len(input), size), input.contiguous()
        self._unpack(ctypes.byref(self._matrix), ids_T.data_ptr(), len(ids_T), rows_TE.data_ptr())
        return rows_TE.to(self.weight.dtype)


class NativeTransformer:
    """Transformer computed by native kernels. It packs the matrices of a `Transformer`, and frees each original.

    The given `Transformer` cannot be used afterwards.

    Raises:
        ValueError: the kernels do not support the model, see `computes`.
    """

    def __init__(self, model: Transformer, kernels: KernelLibrary) -> None:
        weight_VE = model.token_embedding.weight
        if weight_VE.device.type != "cpu" or not computes(model.config, weight_VE.dtype):
            raise ValueError("the native kernels do not support this model; compute it with its Transformer")
        self.config, self.huge_pages = model.config, HugePages()
        self.final_norm, self.layers = model.final_norm, model.layers
        self._blocks = [cast(Block, block) for block in model.layers]
        self.kernel_level = kernels.level
        self._model, self._dtype, self.kernels = model, weight_VE.dtype, kernels
        del weight_VE  # a tied embedding is freed before the layers are packed
        self._between = kernels.function("kvasir_between_attentions", _POINTER, _INT)
        self._all_layers = kernels.function("kvasir_layers", _POINTER)
        self._logits = kernels.function("kvasir_logits", _POINTER)
        self._decode = kernels.function("kvasir_decode", _POINTER, result=ctypes.c_bool)
        self._are_tokens = kernels.function("kvasir_are_tokens", _POINTER, _INT, _INT, result=ctypes.c_bool)
        self._kept: list[object] = []  # keeps the memory behind the pointers alive
        rotaries = [rotary for rotary in (model.rotary, model.local_rotary) if rotary is not None]
        num_angles = sum(len(rotary.frequencies) for rotary in rotaries)
        if model.config.score_growth is not None:
            num_angles *= 2  # queries have their own
        self._shape = shape_of(model.config, self._dtype, num_angles)
        self._head = self._matrix(model.token_embedding if model.lm_head is None else model.lm_head)
        self._rows = self._embedding_rows(model)
        self.token_embedding = model.token_embedding
        self._embeds = bool(self._rows.packed or self._rows.embedding)
        self._layers = (LayerWeights * len(model.layers))()
        for number, block in enumerate(self._blocks):
            self._layers[number] = self._layer(block)
            del block.attention.qkv, block.attention.out, block.mlp, block.layer_input
        model.lm_head = None
        self._layer_inputs = None if model.layer_inputs is None else self._inputs_of_layers(model.layer_inputs)
        self._step = StepArguments(
            *(ctypes.addressof(x) for x in (self._shape, self._rows, self._layers)),
            None if self._layer_inputs is None else ctypes.addressof(self._layer_inputs),
            num_layers=len(self._layers),
            vocabulary=self.config.vocab_size,
            head=ctypes.addressof(self._head),
        )
        # Logits are linear in the final norm.
        self._step.norm, self._step.norm_bias = self._norm(model.final_norm, divisor=self.config.logit_divisor)
        self._buffers: dict[str, Tensor] = {}
        self._capacity = 0
        self._call_cache: KVCache | None = None  # the cache that `_calls` are for
        self._calls: Any = None  # attention arguments of each layer; None if a layer has another backend
        self._prepared: _PreparedDecode | None = None
        self._rotations = (torch.empty(0), torch.empty(0))
        self._biases_HX, self._num_biases = torch.empty(0), 0  # of all layers, and their number of distances

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Dtype of the adapters' weights: float32 with float32 matrices; else bfloat16, which halves their memory."""
        return torch.float32 if self._layers[0].qkv.numbers == NUMBERS[torch.float32] else torch.bfloat16

    def __call__(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """Return next-token logits. See `Transformer.forward`."""
        x_TE = self.hidden(token_ids_T, metadata, kv_cache)
        return self.logits(x_TE if metadata.logit_rows_R is None else x_TE[metadata.logit_rows_R])

    def hidden(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Return the last layer's output before the final norm: float32, in a buffer that the next call overwrites.

        With a KV-cache, the tokens' keys and values are written to the slots that the metadata names. `adapters`: LoRA
        adapter of each token; None: no token has one.

        Raises:
            ValueError: see `NativeAttention.prepare_step`.
            IndexError: a token id, or a position in a learned embedding, is out of range.
        """
        count = len(token_ids_T)
        self._grow_buffers(count)
        x_TE = self._buffers["x"][:count, : self.config.hidden_size]
        token_ids_T, positions_T = token_ids_T.contiguous(), metadata.positions_T.contiguous()
        self._set_rows(token_ids_T, positions_T, max(metadata.context_lengths), adapters)
        if not self._embeds or not self._are_tokens(self._rows.tokens, count, self.config.vocab_size):
            x_TE.copy_(self._model.embed(token_ids_T, positions_T))
        if kv_cache is not None and self._set_attention(metadata, kv_cache) is not None:
            self._all_layers(ctypes.byref(self._step))
            return x_TE
        kv_of: KeysValues = {}
        for number, attention in enumerate(block.attention for block in self._blocks):
            self._between(ctypes.byref(self._step), number)
            q_THD, k_TKD, v_TKD = self._heads(number, count)
            if attention.is_kv_shared:
                kv_of[number] = k_TKD.clone(), v_TKD.clone()  # later layers overwrite the buffer
            elif attention.kv_source != number:
                k_TKD, v_TKD = kv_of[attention.kv_source]
            mixed_THD = attention.backend.attend(
                q_THD, k_TKD, v_TKD, form=attention.form, metadata=metadata, kv_cache=kv_cache
            ).contiguous()
            self._step.mixed = mixed_THD.data_ptr()
        self._between(ctypes.byref(self._step), len(self.layers))
        return x_TE

    def logits(self, x_RE: Tensor) -> Tensor:
        """Return next-token logits, float32 (rows, vocabulary), for rows of the result of `hidden`."""
        count, size = x_RE.shape
        self._grow_buffers(count)
        x_RE = (functional.pad(x_RE, (0, padded(size) - size)) if size < padded(size) else x_RE).contiguous()
        rows = self._rows
        rows.count, rows.threads, rows.x = count, torch.get_num_threads(), x_RE.data_ptr()
        logits_RV = torch.empty(count, self._head.outputs)
        self._step.logits = logits_RV.data_ptr()
        self._logits(ctypes.byref(self._step))
        return logits_RV[:, : self.config.vocab_size]

    def decode(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        *,
        num_ids: int,
        adapters: AdapterRows | None = None,
    ) -> Decoded | None:
        """Compute one decode step, one token per sequence, in a single C call. The next call overwrites the logits.

        The call's arguments are prepared once, and reused while the caller passes the same tensors, updated in place.
        num_ids: number of token ids, from 0 on, whose logits are returned.
        adapters: LoRA adapter of each sequence; None: no sequence has one.

        Returns None, without writing to the KV-cache, if `metadata` has no `contexts_B`, if a layer's attention is not
        native, or if a token id or position is out of range. With reused arguments, a slot or block out of range also
        returns None. The caller must then use `hidden` and `logits`.

        Raises:
            ValueError: while the arguments are prepared, see `NativeAttention.prepare_step`.
            IndexError: a token id is out of range, and PyTorch computes the embeddings; see `_embedding_rows`.
        """
        tensors = metadata.positions_T, metadata.slot_mapping_T, metadata.block_tables_BN, metadata.contexts_B
        prepared, inputs = self._prepared, (token_ids_T, *tensors, kv_cache, adapters)
        if (
            prepared is None
            or not all(map(operator.is_, prepared.inputs, inputs))
            or (prepared.arguments.num_ids, prepared.rows.threads) != (num_ids, torch.get_num_threads())
        ):
            prepared = self._prepared = self._prepare_decode(token_ids_T, metadata, kv_cache, num_ids, adapters)
        if prepared is None:
            return None
        if not self._embeds:
            x_TE = self._buffers["x"][: len(token_ids_T), : self.config.hidden_size]
            x_TE.copy_(self._model.embed(token_ids_T, metadata.positions_T))
        if not self._decode(ctypes.byref(prepared.arguments)):
            self._prepared = None
            return None
        return Decoded(prepared.ids[:], prepared.logits_BV)

    def _prepare_decode(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        num_ids: int,
        adapters: AdapterRows | None,
    ) -> _PreparedDecode | None:
        count = len(token_ids_T)
        self._grow_buffers(count)
        step = None if metadata.contexts_B is None else self._set_attention(metadata, kv_cache)
        if step is None:
            return None
        self._set_rows(token_ids_T, metadata.positions_T, step.longest, adapters)
        rows, arguments = Rows.from_buffer_copy(self._rows), StepArguments.from_buffer_copy(self._step)
        logits_BV, ids = torch.empty(count, self._head.outputs), (_INT * count)()
        arguments.rows, arguments.logits = ctypes.addressof(rows), logits_BV.data_ptr()
        arguments.ids, arguments.num_ids = ctypes.addressof(ids), num_ids
        length_of_tables = len(self._rotations[0]) or self._num_biases
        arguments.num_positions = length_of_tables or self.config.max_context_length
        tensors = metadata.positions_T, metadata.slot_mapping_T, metadata.block_tables_BN, metadata.contexts_B
        held = step, self._calls, self._rotations, self._biases_HX
        inputs = token_ids_T, *tensors, kv_cache, adapters
        return _PreparedDecode(inputs, arguments, rows, logits_BV[:, :num_ids], ids, held)

    def _set_rows(self, token_ids_T: Tensor, positions_T: Tensor, longest: int, adapters: AdapterRows | None) -> None:
        """Point the kernels to a step's token ids, positions, rotations and adapters. longest: longest context."""
        rows = self._rows
        rows.count, rows.threads, rows.x = len(token_ids_T), torch.get_num_threads(), self._buffers["x"].data_ptr()
        rows.tokens, rows.positions = token_ids_T.data_ptr(), positions_T.data_ptr()
        rows.cosines, rows.sines = (table.data_ptr() for table in self._rotations_of(longest))
        rows.adapters = None if adapters is None else ctypes.addressof(adapters.pointers)
        if adapters is not None:
            rows.pieces, rows.num_pieces = adapters.starts_P.data_ptr(), len(adapters.starts_P) - 1
            rows.low, rows.low_stride = adapters.low_TR.data_ptr(), adapters.low_TR.shape[1]
            rows.additions = adapters.additions_TF.data_ptr()

    def _set_attention(self, metadata: AttentionMetadata, kv_cache: KVCache) -> AttentionStep | None:
        """Set and return the attention arguments of a step, for the kernel that computes all layers.

        Returns None if some layer's attention is not computed by the native kernel.
        """
        if self._call_cache is not kv_cache:
            self._call_cache, self._calls = kv_cache, self._make_calls(kv_cache)
        if self._calls is None:
            return None
        backend = cast(NativeAttention, self._blocks[0].attention.backend)
        step = backend.prepare_step(metadata, kv_cache)
        if self._calls[0].threads != step.threads:
            for call in self._calls:
                call.threads = step.threads
        self._set_biases(step.longest)
        kernel = self.kernels.function(KERNEL_NAMES[kv_cache.dtype, kv_cache.cache_dtype], _POINTER, _POINTER)
        self._step.attend = ctypes.cast(kernel, _POINTER)
        self._step.batch, self._step.calls = ctypes.addressof(step.batch), ctypes.addressof(self._calls)
        self._step.mixed = self._buffers["mixed"].data_ptr()
        return step

    def _set_biases(self, longest: int) -> None:
        """Set all layers' position biases, if the model has any, for contexts of `longest` tokens or more."""
        form = self._blocks[0].attention.form
        if form.bias is not None and longest > self._num_biases:
            self._num_biases = max(256, 2 * longest)
            self._biases_HX = position_biases(form, self.config.num_heads, self._num_biases)  # equal in all layers
            self._prepared = None  # its calls point to the previous biases
        if self._calls[0].bias_length != self._num_biases:
            for call in self._calls:
                set_biases(call, self._biases_HX, self._num_biases)

    def _make_calls(self, kv_cache: KVCache) -> Any:
        """Return the attention kernel's arguments for every layer; None if a layer's attention is not native."""
        calls, mixed = [], self._buffers["mixed"]
        for number, attention in enumerate(block.attention for block in self._blocks):
            heads = self._heads(number, self._capacity)
            is_native = isinstance(attention.backend, NativeAttention)
            if not is_native or not supports(heads[0], heads[2], attention.form, kv_cache):
                return None
            out_THD = mixed.flatten()[: heads[0].numel()].view(heads[0].shape)
            calls.append(layer_call(*heads, out_THD, attention.form, kv_cache))
        return (AttentionCall * len(calls))(*calls)

    def _heads(self, layer: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the buffer that the kernels fill with a layer's queries THD, keys TKD and values TKD.

        If the layer reads the keys and values of an earlier layer, K is 0.
        """
        weights, size = self._layers[layer], self.config.head_dim_of(layer)
        width, counts = weights.qkv.outputs, (self.config.num_heads, weights.kv_heads, weights.kv_heads)
        rows_TX = self._buffers["qkv"].flatten()[: count * width].view(count, width)
        heads_TXD = rows_TX[:, : sum(counts) * size].unflatten(1, (-1, size))
        q_THD, k_TKD, v_TKD = heads_TXD.split(counts, dim=1)
        return q_THD, k_TKD, v_TKD

    def _rotations_of(self, length: int) -> tuple[Tensor, Tensor]:
        """Return tables of cosines and sines for `length` positions or more; empty without rotary positions.

        A position has the angles of `rotary`, then those of `local_rotary` if the model has one. With `score_growth`
        the angles of `rotary` follow for queries, with cosines and sines multiplied by `score_factors`.

        One thread computes the tables. PyTorch's first cosine with two threads can be off by one unit in the last place
        (3 of 40 processes), and the results of a replacement worker would then not be bitwise identical.
        """
        rotaries = [rotary for rotary in (self._model.rotary, self._model.local_rotary) if rotary is not None]
        if rotaries and length > len(self._rotations[0]):
            num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                positions = torch.arange(max(256, 2 * length))
                tables = [[x.chunk(2, dim=-1)[0] for x in rotary(positions)] for rotary in rotaries]
                if (growth := self._blocks[0].attention.score_growth) is not None:
                    factors = score_factors(positions, *growth)[:, None, None]
                    tables += [[x * factors for x in table] for table in tables]
                cosines, sines = (torch.cat(x, dim=-1) for x in zip(*tables, strict=True))
                self._rotations = cosines, sines
            finally:
                torch.set_num_threads(num_threads)
        return self._rotations

    def _grow_buffers(self, count: int) -> None:
        if count <= self._capacity:
            return
        config, dtype = self.config, self._dtype
        hidden, inputs = padded(config.hidden_size), config.layer_input_size or 0
        mlp = padded(max(config.largest_mlp_size, inputs))
        mixed = padded(config.num_heads * config.largest_head_dim)
        widest = max(hidden, mlp, mixed)
        with torch.inference_mode(False):  # else buffers made in inference mode are read-only outside it
            num_inputs = (
                0 if self._layer_inputs is None else count * self._layer_inputs.projection.outputs + _MAX_OVERREAD
            )
            self._buffers = {
                "x": torch.zeros(count, hidden),
                "added": torch.zeros(count, hidden),
                "qkv": torch.zeros(count, max(layer.qkv.outputs for layer in self._layers), dtype=dtype),
                "mixed": torch.zeros(count, config.num_heads * config.largest_head_dim, dtype=dtype),
                "wide": torch.zeros(count, max(hidden + mlp, mixed)),
                "narrow": torch.zeros(count, widest // 32 * 44, dtype=torch.uint8),  # LARGEST_INPUT_BYTES in rows.h
                "scales": torch.zeros(count),
                "layer_inputs": torch.zeros(num_inputs),
            }
        for name, buffer in self._buffers.items():
            if name != "mixed":
                setattr(self._rows, name, buffer.data_ptr())
        self._capacity, self._call_cache, self._prepared = count, None, None

    def _layer(self, block: Block) -> LayerWeights:
        attention, mlp = block.attention, block.mlp
        layer = LayerWeights(
            qkv=self._matrix(attention.qkv),
            out=self._matrix(attention.out),
            query_norm=self._norm(attention.query_norm)[0],
            key_norm=self._norm(attention.key_norm)[0],
            kv_heads=attention.sizes[1] // attention.head_dim,
            head_dim=attention.head_dim,
            mlp=self.config.mlp_size_of(attention.form.layer),
            query_angle=-1,
            key_angle=-1,
            factor=1.0 if block.layer_scalar is None else float(block.layer_scalar),
        )
        if isinstance(mlp, SparseMlp):
            self._set_experts(layer, mlp)
        else:
            gated = isinstance(mlp, GatedMlp)
            layer.up = self._matrix(mlp.gate_up if isinstance(mlp, GatedMlp) else mlp.up, gated=gated)
            layer.down = self._matrix(mlp.down)
        rotary = self._model.local_rotary if attention.rotates_locally else self._model.rotary
        if rotary is not None and attention.is_rotated:
            layer.rotated = 2 * len(rotary.frequencies)
            last = self._shape.num_angles - len(rotary.frequencies)
            layer.key_angle = last if attention.rotates_locally else 0
            layer.query_angle = layer.key_angle if attention.score_growth is None else last
        if attention.value_norm_eps is not None:
            layer.value_norm = self._keep(torch.ones(attention.head_dim))
        if block.layer_input is not None:
            layer.input_gate = self._matrix(block.layer_input.gate)
            layer.input_out = self._matrix(block.layer_input.out)
            layer.input_norm = self._norm(block.layer_input.norm)[0]
        attention_norms, mlp_norms = (
            [block.attention_norm, block.attention_out_norm],
            [block.mlp_norm or block.attention_norm, block.mlp_out_norm],
        )
        if block.norms_outputs:
            attention_norms.reverse()
            mlp_norms.reverse()
        layer.attention_norm, layer.attention_norm_bias = self._norm(attention_norms[0])
        layer.attention_out_norm, layer.attention_out_norm_bias = self._norm(attention_norms[1])
        layer.mlp_norm, layer.mlp_norm_bias = self._norm(mlp_norms[0])
        layer.mlp_out_norm, layer.mlp_out_norm_bias = self._norm(mlp_norms[1])
        return layer

    def _inputs_of_layers(self, module: LayerInputs) -> LayerInputWeights:
        """Pack and free the projection of the layers' inputs; return their weights as the kernels read them."""
        size = cast(int, self.config.layer_input_size)
        inputs = LayerInputWeights(
            projection=self._matrix(module.projection),
            table=self._keep(module.embedding.weight.detach().contiguous()),
            norm=self._norm(module.norm, divisor=2.0**0.5)[0],
            size=size,
            x_factor=self.config.hidden_size**-0.5,
            table_factor=(size / 2) ** 0.5,
        )
        del module.projection
        return inputs

    def _keep(self, tensor: Tensor) -> int:
        """Return a pointer to a tensor, which this model keeps alive."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _set_experts(self, layer: LayerWeights, mlp: SparseMlp) -> None:
        """Set a layer's router, as a float32 matrix, and its experts. Each expert is freed after it is packed."""
        experts, count = [cast(GatedMlp, expert) for expert in mlp.experts], len(mlp.experts)
        del mlp.experts
        arrays = (Matrix * 1)(self._matrix(mlp.router.float())), (Matrix * count)(), (Matrix * count)()
        for number in range(count):
            expert = experts.pop(0)
            arrays[1][number] = self._matrix(expert.gate_up, gated=True)
            arrays[2][number] = self._matrix(expert.down)
        layer.router, layer.expert_ups, layer.expert_downs = map(ctypes.addressof, arrays)
        self._kept += arrays

    def _embedding_rows(self, model: Transformer) -> Rows:
        """Replace the model's token embedding by a packed one if it is quantized or tied to the LM head.

        Returns the kernels' `Rows` structure with pointers to the embedding. The pointers are null if the first layer's
        input is not a plain row of the embedding (scaled, normed, or with positions), or if an unpacked embedding is
        not contiguous.
        """
        embedding, rows = model.token_embedding, Rows()
        linear = embedding.linear if isinstance(embedding, QuantizedEmbedding) else None
        if linear is not None or model.lm_head is None:
            matrix = self._head if linear is model.lm_head else self._matrix(cast(nn.Module, linear))
            model.token_embedding = _PackedEmbedding(matrix, self.kernels, self.config, self._dtype)
            rows.packed = ctypes.addressof(matrix)
        elif embedding.weight.is_contiguous():
            rows.embedding = embedding.weight.data_ptr()
        is_unchanged = self.config.embedding_scale == 1.0 and not self.config.embedding_norm
        return rows if is_unchanged and model.position_embedding is None else Rows()

    def _matrix(self, module: nn.Module, *, gated: bool = False) -> Matrix:
        packed = pack(module, self.kernels, self.huge_pages, gated=gated)
        tensors = packed.weight, packed.bias, packed.scale, packed.shift
        self._kept += [tensor for tensor in tensors if tensor is not None]
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        return Matrix(*pointers, packed.inputs, packed.outputs, packed.numbers)

    def _norm(self, norm: RMSNorm | LayerNorm | None, *, divisor: float = 1.0) -> tuple[int | None, int | None]:
        """Return pointers to float32 copies of a norm's weight and bias, both divided by `divisor`; None if absent."""
        if norm is None:
            return None, None
        bias_E = norm.bias if isinstance(norm, LayerNorm) else None
        offset = 1.0 if isinstance(norm, RMSNorm) and norm.unit_offset else 0.0
        parts = [norm.weight.detach().float() + offset] + ([] if bias_E is None else [bias_E.detach().float()])
        kept: list[Tensor] = [part / divisor for part in parts]
        self._kept += kept
        return kept[0].data_ptr(), None if bias_E is None else kept[1].data_ptr()
