"""What a layer's tokens attend to: the weights of one whole sequence, for people to look at.

The weights are those of `model.attention.eager.attention_weights`, from which the oracle makes its outputs: what is
shown is what is computed.

Legend: T tokens of one sequence, S the same tokens as context, H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from torch import Tensor

from model.attention.as_cached import AsCached
from model.attention.eager import attention_weights
from model.attention.form import AttentionForm
from model.attention.interface import AttentionBackend
from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache
from model.transformer import Attention, Block, Transformer

if TYPE_CHECKING:
    from model.native_transformer import NativeTransformer


class _Recorded(Exception):
    """Ends a forward pass where its purpose is served; carries the weights HTS."""

    def __init__(self, weights_HTS: Tensor) -> None:
        super().__init__()
        self.weights_HTS = weights_HTS


class _RecordingAttention:
    """The backend of the layer that is looked at: computes its weights and goes no further."""

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
        """See `model.attention.interface.AttentionBackend`. Raises `_Recorded` always."""
        raise _Recorded(attention_weights(q_THD, k_TKD, form))


@torch.inference_mode()
def weights_of_layer(
    model: "Transformer | NativeTransformer",
    token_ids: Sequence[int],
    *,
    layer: int,
    held_as: torch.dtype | None = None,
) -> Tensor:
    """The weights HTS of one layer, float32, on the CPU: row t says what token t attends to.

    Rows sum to 1; what is ahead, or behind a window, is exactly 0. Layers before this one run on the model's own
    backend and dtype, layers behind it do not run. Not for two threads at once: the layer's backend is another one
    meanwhile.

    Args:
        held_as: what keys and values are rounded to, as a cache would hold them; None for as they are.

    Raises:
        ValueError: there is no such layer, no token, more tokens than the context, or an id out of the vocabulary.
    """
    config = model.config
    if not 0 <= layer < config.num_layers:
        raise ValueError(f"layer {layer} does not exist: the model has layers 0 to {config.num_layers - 1}")
    if not 1 <= len(token_ids) <= config.max_context_length:
        raise ValueError(f"{len(token_ids)} tokens, but 1 to {config.max_context_length} can be looked at")
    if not 0 <= min(token_ids) <= max(token_ids) < config.vocab_size:
        raise ValueError(f"token ids from {min(token_ids)} to {max(token_ids)}; the vocabulary has {config.vocab_size}")
    device = model.token_embedding.weight.device
    metadata = AttentionMetadata.uncached((len(token_ids),), device)
    attentions = [cast(Block, block).attention for block in model.layers[: layer + 1]]
    backends: list[AttentionBackend] = [attention.backend for attention in attentions]
    meanwhile: list[AttentionBackend] = [*backends[:-1], _RecordingAttention()]
    if held_as is not None:
        meanwhile = [AsCached(backend, held_as) for backend in meanwhile]
    try:
        _give(attentions, meanwhile)
        model(torch.tensor(token_ids, device=device), metadata, None)
    except _Recorded as recorded:
        return recorded.weights_HTS.cpu()
    finally:
        _give(attentions, backends)
    raise AssertionError(f"layer {layer} attended to nothing")


def _give(attentions: Sequence[Attention], backends: Sequence[AttentionBackend]) -> None:
    for attention, backend in zip(attentions, backends, strict=True):
        attention.backend = backend
