"""Decoder-only transformer: the whole architecture on one page.

Batches are packed: the tokens of all sequences are concatenated. With `kv_cache=None` a call computes whole sequences,
as in training.

Legend: T packed tokens, R rows whose logits are wanted, E hidden size, H query heads, K key/value heads,
D head dimension, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention.backends import AttentionBackend
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata, soft_cap
from model.attention.score_biases import SCORE_BIASES, relative_positions
from model.config import ModelConfig
from model.config_enums import AttentionKind, NormPlacement, PositionKind, QkNormScope
from model.nn.layers import LayerInput, LayerInputs, RMSNorm, make_mlp, make_norm
from model.nn.position_embeddings import RotaryPositions, SinusoidalPositions, rotate, score_factors

Rotation = tuple[Tensor, Tensor]  # cosines and sines of each token's angles
# Keys and values of a step's tokens, TKD, by the number of the layer that computed them.
KeysValues = dict[int, tuple[Tensor, Tensor]]
RotateAndWrite: TypeAlias = (
    "Callable[[Attention, Tensor, Tensor, Tensor, Rotation | None, Tensor, KVCache], tuple[Tensor, Tensor]]"
)


class Attention(nn.Module):
    """Causal self-attention by the config: multi-head, grouped-query or multi-query, or an average of the values.

    table: parameters that the score biases of all layers share (`relative_positions`); None: no shared parameters.
    kv_source: layer whose keys and values this layer reads: its own, or those of an earlier layer.
    is_kv_shared: later layers read the keys and values of this layer.
    fused: GPU kernel that does what `rotated`, in place, and `KVCache.write` do; None: PyTorch.
    """

    fused: "RotateAndWrite | None" = None

    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int, table: nn.Embedding | None) -> None:
        super().__init__()
        self.kv_source, self.is_kv_shared = config.kv_source(layer), layer in config.kv_shared_layers
        self.num_heads, self.head_dim = config.num_heads, config.head_dim_of(layer)
        query, key = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        if self.kv_source != layer:
            key = 0
        self.sizes = [query, key, key]
        self.averages = config.attention is AttentionKind.AVERAGE
        if self.averages:
            self.value = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        else:
            self.qkv = nn.Linear(config.hidden_size, query + 2 * key, bias=config.attention_bias)
        self.out = nn.Linear(query, config.hidden_size, bias=bool(config.attention_out_bias))
        self.norms_heads = config.qk_norm_scope is QkNormScope.HEAD
        self.norms_rotated = config.qk_norm_after_rotation
        if self.norms_heads:
            query, key = self.head_dim, self.head_dim if key else 0
        offset = config.norm_unit_offset
        self.query_norm = RMSNorm(query, config.norm_eps, unit_offset=offset) if config.qk_norm else None
        self.key_norm = RMSNorm(key, config.norm_eps, unit_offset=offset) if config.qk_norm and key else None
        self.value_norm_eps = config.norm_eps if config.value_norm and key else None
        self.bias = SCORE_BIASES[config.position](config, table) if config.position in SCORE_BIASES else None
        self.form = AttentionForm(
            layer=layer,
            scale=config.effective_score_scale,
            window=config.window(layer),
            bias=self.bias,
            soft_cap=config.score_soft_cap,
        )
        self.score_growth: tuple[float, int] | None = None
        if config.score_growth is not None and config.score_growth_interval is not None:
            self.score_growth = config.score_growth, config.score_growth_interval
        self.is_rotated = layer not in config.unrotated_layers
        self.rotates_locally = config.local_rope_theta is not None and self.form.window is not None
        self.backend = backend

    def forward(
        self,
        x_TE: Tensor,
        rotation: Rotation | None,
        *,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
        kv_of: KeysValues,
    ) -> Tensor:
        """Apply self-attention to packed tokens; input and output have the shape (tokens, hidden size).

        kv_of: keys and values that later layers read, by layer. This layer adds its own if later layers read them.
        """
        q_THD, k_TKD, v_TKD = self._project(x_TE)
        if not self.is_rotated:
            rotation = None
        if self.fused is None or kv_cache is None:
            q_THD, k_TKD = self.rotated(q_THD, k_TKD, rotation)
        else:
            assert metadata.slot_mapping_T is not None
            q_THD, k_TKD = self.fused(self, q_THD, k_TKD, v_TKD, rotation, metadata.slot_mapping_T, kv_cache)
        if self.score_growth is not None:
            q_THD = (q_THD * score_factors(metadata.positions_T, *self.score_growth)[:, None, None]).to(q_THD.dtype)
        if self.kv_source != self.form.layer:
            k_TKD, v_TKD = kv_of[self.kv_source]
        elif self.is_kv_shared:
            kv_of[self.form.layer] = k_TKD, v_TKD
        mixed_THD = self.backend.attend(q_THD, k_TKD, v_TKD, form=self.form, metadata=metadata, kv_cache=kv_cache)
        out: Tensor = self.out(mixed_THD.flatten(1))
        return out

    def _project(self, x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens' queries THD, keys TKD and values TKD.

        In average attention D is 0 for queries and keys. If keys and values are those of an earlier layer, K is 0.
        """
        if self.averages:
            v_TKD = torch.unflatten(self.value(x_TE), -1, (-1, self.head_dim))
            return v_TKD.new_empty(len(x_TE), self.num_heads, 0), v_TKD[..., :0], v_TKD
        parts = torch.split(self.qkv(x_TE), self.sizes, dim=-1)
        q_THD, k_TKD, v_TKD = (x.unflatten(-1, (x.shape[-1] // self.head_dim, self.head_dim)) for x in parts)
        if self.value_norm_eps is not None:
            v_TKD = functional.rms_norm(v_TKD.float(), v_TKD.shape[2:], eps=self.value_norm_eps).to(v_TKD.dtype)
        return q_THD, k_TKD, v_TKD

    def rotated(self, q_THD: Tensor, k_TKD: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Return the queries and keys normed and rotated, as far as the model does either."""
        if not self.norms_rotated:
            q_THD, k_TKD = self._normed(self.query_norm, q_THD), self._normed(self.key_norm, k_TKD)
        if rotation is not None:
            q_THD, k_TKD = rotate(q_THD, rotation), rotate(k_TKD, rotation)
        if self.norms_rotated:
            q_THD, k_TKD = self._normed(self.query_norm, q_THD), self._normed(self.key_norm, k_TKD)
        return q_THD, k_TKD

    def _normed(self, norm: RMSNorm | None, x_THD: Tensor) -> Tensor:
        """Return queries or keys normed by `norm`; unchanged if `norm` is None."""
        if norm is None:
            return x_THD
        normed: Tensor = norm(x_THD) if self.norms_heads else norm(x_THD.flatten(1)).view(x_THD.shape)
        return normed


class Block(nn.Module):
    """Transformer layer: x += attention(norm(x)); x += mlp(norm(x)).

    A layer of Gemma 4 then adds the output of its `LayerInput`, and multiplies x by `layer_scalar`. With post-norm
    (OLMo 2) the outputs of attention and MLP are normed, not their inputs; in Gemma 2 both are. In a parallel block
    (GPT-NeoX) attention and MLP read the same x, in Falcon 7B and Cohere normed by the same norm. `dropout` is the
    dropout rate of all outputs in training.

    A layer leaves its last addition to the next layer, whose first norm can include it: see `Norm.add`.
    """

    dropout = 0.0

    def __init__(self, config: ModelConfig, backend: AttentionBackend, layer: int, table: nn.Embedding | None) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = Attention(config, backend, layer, table)
        self.mlp_norm = None if config.shares_norm else make_norm(config, config.hidden_size)
        has_both = config.norm_placement is NormPlacement.BOTH
        self.attention_out_norm = make_norm(config, config.hidden_size) if has_both else None
        self.mlp_out_norm = make_norm(config, config.hidden_size) if has_both else None
        self.mlp = make_mlp(config, layer)
        size = config.layer_input_size
        self.layer_input = None if size is None else LayerInput(config, size)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.has_layer_scalar else None
        self.norms_outputs = config.norm_placement is NormPlacement.POST
        self.is_parallel = config.parallel_residual

    def forward(
        self,
        x_TE: Tensor,
        added_TE: Tensor | None,
        rotation: Rotation | None,
        input_TP: Tensor | None,
        *,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
        kv_of: KeysValues,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to x + added: packed tokens, (tokens, hidden size). Return two parts of the sum, likewise.

        added_TE: None in place of zeros.
        input_TP: vectors of `LayerInputs` for this layer; None for models without `layer_input_size`.
        """
        attend = partial(self.attention, rotation=rotation, metadata=metadata, kv_cache=kv_cache, kv_of=kv_of)
        x_TE, added_TE = self._add_attention_and_mlp(x_TE, added_TE, attend)
        if self.layer_input is not None:
            x_TE = x_TE + added_TE
            added_TE = self._drop(self.layer_input(x_TE, input_TP))
        return (x_TE, added_TE) if self.layer_scalar is None else ((x_TE + added_TE) * self.layer_scalar, None)

    def _add_attention_and_mlp(
        self, x_TE: Tensor, added_TE: Tensor | None, attend: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.norms_outputs:
            assert self.mlp_norm is not None
            x_TE = x_TE if added_TE is None else x_TE + added_TE
            x_TE = x_TE + self._drop(self.attention_norm(attend(x_TE)))
            return x_TE, self._drop(self.mlp_norm(self.mlp(x_TE)))
        x_TE, normed_TE = self.attention_norm.add(x_TE, added_TE)
        attended_TE = attend(normed_TE)
        if self.attention_out_norm is not None:
            attended_TE = self.attention_out_norm(attended_TE)
        attended_TE = self._drop(attended_TE)
        if self.is_parallel:
            normed_TE = normed_TE if self.mlp_norm is None else self.mlp_norm(x_TE)
            x_TE = x_TE + attended_TE
        else:
            assert self.mlp_norm is not None
            x_TE, normed_TE = self.mlp_norm.add(x_TE, attended_TE)
        out_TE = self.mlp(normed_TE)
        if self.mlp_out_norm is not None:
            out_TE = self.mlp_out_norm(out_TE)
        return x_TE, self._drop(out_TE)

    def _drop(self, x_TE: Tensor) -> Tensor:
        """Apply dropout (Srivastava et al. 2014) while training; return x itself otherwise."""
        return functional.dropout(x_TE, self.dropout) if self.training and self.dropout else x_TE


class Transformer(nn.Module):
    """Decoder-only transformer, from token ids to next-token logits.

    Names and shapes of its parameters: `config.parameter_shapes()`. Before use, load weights or call
    `initialize`.
    """

    def __init__(self, config: ModelConfig, attention: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = make_norm(config, config.hidden_size) if config.embedding_norm else None
        self.position_embedding: nn.Embedding | SinusoidalPositions | None = None
        self.position_offset = config.position_offset or 0
        self.rotary: RotaryPositions | None = None
        self.local_rotary: RotaryPositions | None = None  # of layers with a window; None: the same as `rotary`
        match config.position:
            case PositionKind.LEARNED:
                rows = config.max_context_length + self.position_offset
                self.position_embedding = nn.Embedding(rows, config.hidden_size)
            case PositionKind.SINUSOIDAL:
                self.position_embedding = SinusoidalPositions(config.hidden_size)
            case PositionKind.ROTARY:
                size = config.global_head_dim or config.rotary_size
                form = size, config.rope_theta, config.rope_scaling
                self.rotary = RotaryPositions(*form, max_context_length=config.max_context_length)
                if config.local_rope_theta is not None:
                    self.local_rotary = RotaryPositions(config.rotary_size, config.local_rope_theta, None)
        input_size = config.layer_input_size
        self.layer_inputs = None if input_size is None else LayerInputs(config, input_size)
        self.relative_positions = relative_positions(config)
        self.layers = nn.ModuleList(
            Block(config, attention, layer, self.relative_positions) for layer in range(config.num_layers)
        )
        self.final_norm = make_norm(config, config.hidden_size)
        self.lm_head: nn.Module | None = None  # None if embeddings are tied
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """Return next-token logits, float32 (rows, vocabulary), of the tokens `metadata.logit_rows_R`; None: of all."""
        x_TE = self.hidden(token_ids_T, metadata, kv_cache)
        return self.logits(x_TE if metadata.logit_rows_R is None else x_TE[metadata.logit_rows_R])

    def hidden(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache | None) -> Tensor:
        """Return the last layer's output before the final norm: (tokens, hidden size) in the model's dtype.

        With a KV-cache, the tokens' keys and values are written to the slots that the metadata names.

        Raises:
            ValueError: token ids and positions differ in shape, or there is a KV-cache without slots or slots without
                a KV-cache.
        """
        if token_ids_T.shape != metadata.positions_T.shape:
            shapes = f"{tuple(token_ids_T.shape)} and {tuple(metadata.positions_T.shape)}"
            raise ValueError(f"token_ids_T and positions_T must have the same shape (num_tokens,), not {shapes}")
        if (kv_cache is None) != (metadata.slot_mapping_T is None):
            raise ValueError("give a KV-cache and metadata with slot_mapping_T and block_tables_BN, or neither of them")
        x_TE = self.embed(token_ids_T, metadata.positions_T)
        rotation = None if self.rotary is None else self.rotary(metadata.positions_T)
        local_rotation = None if self.local_rotary is None else self.local_rotary(metadata.positions_T)
        inputs_TLP = None if self.layer_inputs is None else self.layer_inputs(token_ids_T, x_TE)
        added_TE: Tensor | None = None
        kv_of: KeysValues = {}
        for number, layer in enumerate(self.layers):
            own_rotation = local_rotation if cast(Block, layer).attention.rotates_locally else rotation
            input_TP = None if inputs_TLP is None else inputs_TLP[:, number]
            x_TE, added_TE = layer(
                x_TE, added_TE, own_rotation, input_TP, metadata=metadata, kv_cache=kv_cache, kv_of=kv_of
            )
        return x_TE if added_TE is None else x_TE + added_TE

    def logits(self, x_RE: Tensor) -> Tensor:
        """Return next-token logits, float32 (rows, vocabulary), for rows of the result of `hidden`."""
        x_RE = self.final_norm(x_RE)
        head = self.lm_head
        logits_RV: Tensor = functional.linear(x_RE, self.token_embedding.weight) if head is None else head(x_RE)
        logits_RV = (
            logits_RV.float() if self.config.logit_divisor == 1.0 else logits_RV.float() / self.config.logit_divisor
        )
        return logits_RV if self.config.logit_soft_cap is None else soft_cap(logits_RV, self.config.logit_soft_cap)

    def embed(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the embeddings of tokens and positions: (tokens, hidden size), the model's dtype.

        The token embeddings are scaled and normed as the config says. Learned or sinusoidal position embeddings, if the
        model has them, are then added here.
        """
        x_TE: Tensor = self.token_embedding(token_ids_T)
        if self.config.embedding_scale != 1.0:
            # Round the factor to the model's dtype first, as transformers does for Gemma.
            x_TE = x_TE * torch.full((), self.config.embedding_scale, dtype=x_TE.dtype, device=x_TE.device)
        if self.embedding_norm is not None:
            x_TE = self.embedding_norm(x_TE)
        if self.position_embedding is not None:
            x_TE = x_TE + self.position_embedding(positions_T + self.position_offset).to(x_TE.dtype)
        return x_TE

    def initialize(self, seed: int) -> None:
        """Initialize all parameters from a seed, as `initialize_parameter` does."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            initialize_parameter(name, parameter, self.config, generator)


@torch.no_grad()
def initialize_parameter(name: str, parameter: Tensor, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Fill a parameter in place and return it: normal with standard deviation 1/sqrt(fan-in), embeddings 0.02.

    Matrices that write to the residual stream are divided by sqrt(2 * layers), so that the stream's variance does
    not grow with depth (GPT-2, Radford et al. 2019, section 2.3). Biases are 0, and norms multiply by 1.
    """
    if name.endswith(".bias"):
        return parameter.zero_()
    if parameter.ndim == 1:
        return parameter.fill_(0.0 if config.norm_unit_offset else 1.0)
    if not name.startswith(("layers.", "lm_head.")):
        return parameter.normal_(0.0, 0.02, generator=generator)
    scale = (2 * config.num_layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
    return parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5, generator=generator)
