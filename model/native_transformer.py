"""The transformer by kernels of our own, on CPUs: one call for all layers, where their attention is our kernel's too,
else one between two layers' attentions; and one for the logits.

The twin of `model.transformer.Transformer`, from whose matrices it is made and with which it agrees within rounding:
the residual stream and what is between two matrices stay float32 here. Every output of a matrix is one sum over its
inputs in their order, so that a row's bits do not depend on how many rows or threads there are, one included.

Legend: T packed tokens, R rows whose logits are wanted, E hidden size, F outputs and I inputs of a matrix, H query
heads, K key/value heads, D head dimension, X queries, keys and values side by side, V vocabulary.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.metadata import AttentionMetadata
from model.attention.native import KERNEL_NAMES, AttentionCall, NativeAttention, is_known
from model.config import ModelConfig
from model.kernels.loading import KernelLibrary, Kernels
from model.kernels.structures import LayerWeights, Matrix, Rows, Shape
from model.kinds import AttentionKind, MlpKind, NormKind, NormPlacement, PositionKind, QkNormScope
from model.kv_cache import KVCache
from model.layers import GatedMlp, LayerNorm, RMSNorm
from model.linear import Int8Linear, PackedLinear
from model.packing import Packed, interleaved, pack_floats, pack_int8, padded
from model.pages import HugePages
from model.transformer import Block, Transformer

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
# What a row of one thread's scratch holds, see layers.cpp.
_MOST_NUMBERS = 65_536
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_ACTIVATIONS = {MlpKind.GELU: 0, MlpKind.GELU_EXACT: 1, MlpKind.RELU: 2, MlpKind.SWIGLU: 3, MlpKind.GEGLU: 0}


@dataclass(frozen=True, slots=True)
class _Calls:
    """The attention of every layer over one cache, ready to be called: an array of `AttentionCall`. `backend` is None
    where it is not all the kernel's, or adds to its scores."""

    kv_cache: KVCache
    backend: NativeAttention | None
    layers: Any


def is_native(model: Transformer) -> bool:
    """Whether these kernels compute all of this model."""
    config, weight = model.config, model.token_embedding.weight
    widths = (config.hidden_size, config.mlp_size, config.num_heads * config.head_dim)
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and config.attention is AttentionKind.SOFTMAX
        and max(widths) <= _MOST_NUMBERS
        and not any(width % 2 for width in widths)
    )


def kernels_for(model: Transformer) -> Kernels | None:
    """The kernels that compute all of this model once they are loaded, as its attention waits for them; None for none:
    its attention is another, or there are no such kernels."""
    backends = {cast(Block, block).attention.backend for block in model.layers}
    backend = backends.pop()
    return backend.kernels if not backends and isinstance(backend, NativeAttention) and is_native(model) else None


class NativeTransformer:
    """Takes the place of the `Transformer` it is made from, whose matrices are freed as they are packed.

    Args:
        keeps_matrices: the model goes on computing meanwhile, until `free_matrices`: both have them till then.

    Raises:
        ValueError: the model is none of those that `is_native` says.
    """

    def __init__(self, model: Transformer, library: KernelLibrary, *, keeps_matrices: bool = False) -> None:
        if not is_native(model):
            raise ValueError("these kernels do not compute such a model")
        self.config = model.config
        self.token_embedding, self.final_norm, self.layers = model.token_embedding, model.final_norm, model.layers
        self._model, self._dtype = model, model.token_embedding.weight.dtype
        self._between = library.function("kvasir_between_attentions", *[_POINTER] * 5)
        self._all_layers = library.function("kvasir_layers", *[_POINTER] * 3, _INT, *[_POINTER] * 3, _INT, _POINTER)
        self._library = library
        self._attention = ctypes.cast(library.function(KERNEL_NAMES[self._dtype], _POINTER, _POINTER), _POINTER)
        self._logits = library.function("kvasir_logits", *[_POINTER] * 6)
        self._are_tokens = library.function("kvasir_are_tokens", _POINTER, _INT, _INT, result=ctypes.c_bool)
        self._side_by_side = library.function("kvasir_inputs_side_by_side", _INT, result=_INT)
        self._kept: list[Tensor] = []  # what pointers lead to
        self._huge_pages = HugePages()
        self._shape = _shape_of(model.config, self._dtype)
        self._head = self._matrix(model.token_embedding if model.lm_head is None else model.lm_head)
        self._head_norm = self._norm(model.final_norm)
        self._layers = (LayerWeights * len(model.layers))()
        for number, block in enumerate(model.layers):
            self._layers[number] = self._layer(cast(Block, block))
            if not keeps_matrices:
                _free_matrices(cast(Block, block))
        if not keeps_matrices:
            self.free_matrices()
        self._rows = Rows(embedding=self._embedding())
        self._buffers: dict[str, Tensor] = {}
        self._capacity = 0
        self._calls: _Calls | None = None
        self._rotations = (torch.empty(0), torch.empty(0))

    def free_matrices(self) -> None:
        """Free what the model still has of them: it computes no more."""
        self._model.lm_head = None
        for block in self.layers:
            _free_matrices(cast(Block, block))

    def enlarge_pages(self) -> None:
        """Move the matrices to pages of 2 MiB, see `HugePages.enlarge`; for a thread, they serve meanwhile."""
        self._huge_pages.enlarge()

    def __call__(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """See `Transformer.forward`."""
        x_TE = self.hidden(token_ids_T, metadata, kv_cache)
        return self.logits(x_TE if metadata.logit_rows_R is None else x_TE[metadata.logit_rows_R])

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """What the last layer gives, TE float32, before the final norm; valid until the next call."""
        count = len(token_ids_T)
        self._hold(count)
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
        """All layers, each with its own attention, whatever that is."""
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
        """All layers in one call; False, and nothing done, where their attention is not all of our own kernel's."""
        if self._calls is None or self._calls.kv_cache is not kv_cache:
            self._calls = self._make_calls(kv_cache)
        backend = self._calls.backend
        step = None if backend is None else backend.step_of(metadata, kv_cache)
        if step is None or step.loaded is not self._library:
            return False
        if self._calls.layers[0].threads != step.threads:
            for call in self._calls.layers:
                call.threads = step.threads
        self._all_layers(
            *(ctypes.byref(self._shape), ctypes.byref(self._rows), self._layers, len(self._layers)),
            *(self._attention, ctypes.byref(step.batch), self._calls.layers, ctypes.sizeof(AttentionCall)),
            self._buffers["mixed"].data_ptr(),
        )
        return True

    def _make_calls(self, kv_cache: KVCache) -> "_Calls":
        """Each layer's attention over the buffers there are, in a cache."""
        attentions = [cast(Block, block).attention for block in self.layers]
        heads, mixed = self._heads(self._capacity), self._buffers["mixed"]
        backend = attentions[0].backend
        calls = (AttentionCall * len(attentions))()
        for call, attention in zip(calls, attentions, strict=True):
            form = attention.form
            if attention.backend is not backend or form.bias is not None or not is_known(*heads[::2], form, kv_cache):
                return _Calls(kv_cache, None, calls)
            pools = kv_cache.keys_LNPKD[form.layer], kv_cache.values_LNPKD[form.layer]
            call.q, call.k, call.v, call.out, call.keys, call.values = (x.data_ptr() for x in (*heads, mixed, *pools))
            call.q_stride = call.k_stride = call.v_stride = self._layers[0].qkv.outputs
            call.num_heads, call.num_kv_heads, call.head_size = *(x.shape[1] for x in heads[:2]), heads[0].shape[2]
            call.window, call.scale = form.window or 0, form.scale
        return _Calls(kv_cache, backend if isinstance(backend, NativeAttention) else None, calls)

    def logits(self, x_RE: Tensor) -> Tensor:
        """Next-token logits of rows of `hidden`, RV float32."""
        count, size = x_RE.shape
        self._hold(count)
        x_RE = (functional.pad(x_RE, (0, padded(size) - size)) if size < padded(size) else x_RE).contiguous()
        rows = self._rows
        rows.count, rows.threads, rows.x = count, torch.get_num_threads(), x_RE.data_ptr()
        logits_RV = torch.empty(count, self._head.outputs)
        shared = ctypes.byref(self._shape), ctypes.byref(rows)
        self._logits(*shared, ctypes.byref(self._head), *self._head_norm, logits_RV.data_ptr())
        return logits_RV[:, : self.config.vocab_size]

    def _heads(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries THD, keys TKD and values TKD, where the kernels write those of every layer."""
        config = self.config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv_TX = self._buffers["qkv"][:count, : query + 2 * key]
        parts = torch.split(qkv_TX, [query, key, key], dim=1)
        q_THD, k_TKD, v_TKD = (torch.unflatten(part, 1, (-1, config.head_dim)) for part in parts)
        return q_THD, k_TKD, v_TKD

    def _rotations_of(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position under `length`, tables that grow; empty without rotary positions."""
        rotary = self._model.rotary
        if rotary is not None and length > len(self._rotations[0]):
            half = self.config.rotary_size // 2
            cosines, sines = rotary(torch.arange(max(256, 2 * length)))
            self._rotations = cosines[:, 0, :half].contiguous(), sines[:, 0, :half].contiguous()
        return self._rotations

    def _hold(self, count: int) -> None:
        """Make the buffers large enough for so many rows."""
        if count <= self._capacity:
            return
        config, dtype = self.config, self._dtype
        hidden, mlp = padded(config.hidden_size), padded(config.mlp_size)
        widest = max(hidden, mlp, padded(config.num_heads * config.head_dim))
        self._buffers = {
            "x": torch.zeros(count, hidden),
            "added": torch.zeros(count, hidden),
            "qkv": torch.zeros(count, self._layers[0].qkv.outputs, dtype=dtype),
            "mixed": torch.zeros(count, config.num_heads * config.head_dim, dtype=dtype),
            "wide": torch.zeros(count, hidden + mlp, dtype=dtype),
            "narrow": torch.zeros(count, widest, dtype=torch.uint8),
            "scales": torch.zeros(count),
        }
        for name, buffer in self._buffers.items():
            if name != "mixed":
                setattr(self._rows, name, buffer.data_ptr())
        self._capacity, self._calls = count, None

    def _embedding(self) -> int | None:
        """A pointer to the tokens' embeddings, where these alone are what the first layer gets."""
        model, weight_VE = self._model, self.token_embedding.weight
        is_all = self.config.embedding_scale == 1.0 and model.position_embedding is None and weight_VE.is_contiguous()
        return weight_VE.data_ptr() if is_all else None

    def _layer(self, block: Block) -> LayerWeights:
        """One layer's pointers; its matrices leave the model."""
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
        return Matrix(*pointers, packed.inputs, packed.outputs, _NUMBERS[packed.weight.dtype])

    def _norm(self, norm: RMSNorm | LayerNorm | None) -> tuple[int | None, int | None]:
        """Pointers to weight and bias, float32."""
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


def pack(module: nn.Module, side_by_side: Callable[[int], int], *, gated: bool = False) -> Packed:
    """The matrix of a module of any kind, or an embedding's.

    Args:
        side_by_side: how many inputs the kernels want so, by the number that stands for their dtype.
        gated: whether its outputs are those of gates, and of what they gate.
    """
    scale_F: Tensor | None = None
    if isinstance(module, Int8Linear):
        weight_FI, scale_F, bias_F = module.weight_FE, module.scale_F, module.bias_F
    elif isinstance(module, PackedLinear):
        weight_FI, bias_F = module.packed.to_dense(), module.bias_F
    else:
        named: dict[str, Any] = dict(module.named_parameters())
        weight_FI, bias_F = named["weight"].detach(), named.get("bias")
    if gated:
        weight_FI = interleaved(weight_FI)
        bias_F = None if bias_F is None else interleaved(bias_F)
        scale_F = None if scale_F is None else interleaved(scale_F)
    if scale_F is not None:
        return pack_int8(weight_FI, scale_F, bias_F, side_by_side(_NUMBERS[torch.int8]))
    return pack_floats(weight_FI, bias_F, side_by_side(_NUMBERS[weight_FI.dtype]))


def _shape_of(config: ModelConfig, dtype: torch.dtype) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.mlp_size,
        rotated=config.rotary_size if config.position is PositionKind.ROTARY else 0,
        norm_scope=int(config.qk_norm_scope is QkNormScope.PROJECTION),
        numbers=_NUMBERS[dtype],
        norm=int(config.norm is NormKind.LAYER_NORM),
        activation=_ACTIVATIONS[config.mlp],
        gated=config.mlp.gated,
        norms_outputs=config.norm_placement is NormPlacement.POST,
        is_parallel=config.parallel_residual,
        eps=config.norm_eps,
    )
