"""A decoder-only transformer, whole, on one page.

Pre-norm blocks: x += attention(norm(x)); x += mlp(norm(x)). Packed and ragged: the tokens of all sequences lie in one
row, and `AttentionMetadata` says whose they are. With `kv_cache=None` every sequence is whole and the same code trains.

Legend: T packed tokens, R rows whose logits are wanted, E hidden size, H query heads, K key/value heads,
D head dimension, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.interface import AttentionBackend
from model.attention.metadata import AttentionMetadata
from model.config import ModelConfig
from model.kinds import PositionKind
from model.kv_cache import KVCache
from model.layers import MLPS, NORMS, RMSNorm
from model.positions import LearnedPositions, RotaryPositions, rotate


class Attention(nn.Module):
    """Causal self-attention: multi-head, grouped-query or multi-query by the config's head counts."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int) -> None:
        super().__init__()
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=config.attention_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.attention_bias)
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.backend = backend
        self.layer = layer

    def forward(
        self,
        x_TE: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        *,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        """TE -> TE."""
        q_THD, k_TKD, v_TKD = torch.split(torch.unflatten(self.qkv(x_TE), -1, (-1, self.head_dim)), self.heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q_THD, k_TKD = self.query_norm(q_THD), self.key_norm(k_TKD)
        if rotation is not None:
            q_THD, k_TKD = rotate(q_THD, rotation), rotate(k_TKD, rotation)
        mixed_THD = self.backend.attend(q_THD, k_TKD, v_TKD, layer=self.layer, metadata=metadata, kv_cache=kv_cache)
        out: Tensor = self.out(mixed_THD.flatten(1))
        return out


class Block(nn.Module):
    """One layer: attention, then MLP, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int) -> None:
        super().__init__()
        self.attention_norm = NORMS[config.norm](config.hidden_size, config.norm_eps)
        self.attention = Attention(config, backend, layer)
        self.mlp_norm = NORMS[config.norm](config.hidden_size, config.norm_eps)
        self.mlp = MLPS[config.mlp](config)

    def forward(
        self,
        x_TE: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        *,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        """TE -> TE."""
        x_TE = x_TE + self.attention(self.attention_norm(x_TE), rotation, metadata=metadata, kv_cache=kv_cache)
        x_TE = x_TE + self.mlp(self.mlp_norm(x_TE))
        return x_TE


class Transformer(nn.Module):
    """Token ids to next-token logits. Its tensors are those of `config.parameter_shapes()`."""

    def __init__(self, config: ModelConfig, attention: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position is PositionKind.LEARNED
        self.position_embedding = LearnedPositions(config.max_context_length, config.hidden_size) if learned else None
        self.rotary = (
            None if learned else RotaryPositions(config.max_context_length, config.head_dim, config.rope_theta)
        )
        self.layers = nn.ModuleList(Block(config, attention, layer) for layer in range(config.num_layers))
        self.final_norm = NORMS[config.norm](config.hidden_size, config.norm_eps)
        tied = config.tie_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """Next-token logits, RV float32, for `metadata.logit_rows_R` (all T rows where that is None).

        Raises:
            ValueError: token ids and metadata disagree in length, or metadata and cache do.
        """
        if token_ids_T.shape != metadata.positions_T.shape:
            shapes = f"{tuple(token_ids_T.shape)} and {tuple(metadata.positions_T.shape)}"
            raise ValueError(f"token ids and positions must both be (T,), not {shapes}")
        if (kv_cache is None) != (metadata.slot_mapping_T is None):
            raise ValueError("a cache needs slot_mapping_T and block_tables_BN, and they need a cache")
        x_TE = self.token_embedding(token_ids_T)
        if self.position_embedding is not None:
            x_TE = x_TE + self.position_embedding(metadata.positions_T)
        rotation = None if self.rotary is None else self.rotary(metadata.positions_T)
        for layer in self.layers:
            x_TE = layer(x_TE, rotation, metadata=metadata, kv_cache=kv_cache)
        if metadata.logit_rows_R is not None:
            x_TE = x_TE[metadata.logit_rows_R]
        head = self.token_embedding if self.lm_head is None else self.lm_head
        return functional.linear(self.final_norm(x_TE), head.weight).float()

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Fresh weights, the same for the same seed: normal with 1/sqrt(fan-in), residual outputs scaled down.

        Matrices that write to the residual stream are divided by sqrt(2 * layers), so that its variance does not
        grow with depth (GPT-2, Radford et al. 2019, section 2.3).
        """
        generator = torch.Generator().manual_seed(seed)
        depth_scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            elif "embedding" in name:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                scale = depth_scale if name.endswith(("out.weight", "down.weight")) else 1.0
                parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5, generator=generator)
