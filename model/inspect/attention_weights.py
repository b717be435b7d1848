"""Attention weights of one layer over one whole sequence, for inspection.

Legend: T tokens of one sequence, S the same tokens as context, H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from torch import Tensor

from model.attention.backends import AttentionBackend, RoundedAttention, attention_weights
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.nn.transformer import Block, Transformer

if TYPE_CHECKING:
    from model.native.native_transformer import NativeTransformer


class _Recorded(Exception):
    """Exception that ends the forward pass at the inspected layer, and carries this layer's attention weights HTS."""

    def __init__(self, weights_HTS: Tensor) -> None:
        super().__init__()
        self.weights_HTS = weights_HTS


class _RecordingAttention:
    """Attention backend of the inspected layer: raises `_Recorded` with the attention weights."""

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        form: AttentionForm,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> NoReturn:
        raise _Recorded(attention_weights(q_THD, k_TKD, form))


@torch.inference_mode()
def weights_of_layer(
    model: "Transformer | NativeTransformer",
    token_ids: Sequence[int],
    *,
    layer: int,
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return one layer's attention weights for a text: float32 (query heads, tokens, tokens), on the CPU.

    Weights of masked positions are exactly 0. Earlier layers run with the model's backend and dtype; later layers do
    not run. Not thread-safe: the call replaces the backends of the model's layers until it returns.

    cache_dtype: dtype of a KV-cache, to which keys and values are rounded; None: no rounding.

    Raises:
        ValueError: the layer does not exist, or the token ids do not fit the context or the vocabulary.
    """
    config = model.config
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {config.num_layers - 1}")
    if not 1 <= len(token_ids) <= config.max_context_length:
        raise ValueError(f"the text has {len(token_ids)} tokens; use a text of 1 to {config.max_context_length} tokens")
    if not 0 <= min(token_ids) <= max(token_ids) < config.vocab_size:
        given = f"the given token ids range from {min(token_ids)} to {max(token_ids)}"
        raise ValueError(f"{given}; use ids of this model's tokenizer, 0 to {config.vocab_size - 1}")
    device = model.token_embedding.weight.device
    metadata = AttentionMetadata.uncached((len(token_ids),), device)
    attentions = [cast(Block, block).attention for block in model.layers[: layer + 1]]
    backends: list[AttentionBackend] = [attention.backend for attention in attentions]
    meanwhile: list[AttentionBackend] = [*backends[:-1], _RecordingAttention()]
    if cache_dtype is not None:
        meanwhile = [RoundedAttention(backend, cache_dtype) for backend in meanwhile]
    try:
        for attention, backend in zip(attentions, meanwhile, strict=True):
            attention.backend = backend
        model(torch.tensor(token_ids, device=device), metadata, None)
    except _Recorded as recorded:
        return recorded.weights_HTS.cpu()
    finally:
        for attention, backend in zip(attentions, backends, strict=True):
            attention.backend = backend
    raise AssertionError(f"layer {layer} did not call its attention backend")
