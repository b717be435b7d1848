"""ModelConfig: a frozen, torch-free description of a model's mechanisms and of every tensor's shape.

All values are plain Python, so the API process, which never imports torch, reads them too. Invalid values are
rejected at construction, with a `ValueError` that names the field.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Self

from model.config_enums import (
    SCORED_POSITIONS,
    AttentionKind,
    MlpKind,
    NormKind,
    NormPlacement,
    PositionKind,
    QkNormScope,
    RopeScaling,
    check_keys,
    check_member,
    check_number,
    check_size,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Complete description of a decoder-only transformer.

    The head counts decide the kind of attention. `num_kv_heads == num_heads` is multi-head, `num_kv_heads == 1` is
    multi-query, and anything between is grouped-query attention. `num_heads == 1` is single-head.

    vocab_size, max_context_length, num_layers, hidden_size, mlp_size, head_dim: sizes.
    rope_theta, rotary_dim, rope_scaling: parameters of rotary positions; rotary_dim None rotates the whole head.
    num_relative_buckets: buckets of a relative bias.
    max_relative_distance: farther distances are treated as this one, in a relative bias and in disentangled attention.
    sliding_window: a token sees itself and the `sliding_window - 1` tokens before it, except in `global_layers`.
    score_scale: factor of q·k before the softmax; None is 1/sqrt(head_dim), 1/sqrt(3 head_dim) when disentangled.
    attention_bias: queries, keys and values have biases.
    attention_out_bias: the output projection has a bias; None for the value of attention_bias.
    norm_bias: LayerNorm has a bias.
    norm_unit_offset: RMS norms multiply by 1 + weight (Gemma).
    parallel_residual: attention and MLP read the same x and are added to it together (GPT-NeoX).
    embedding_scale: factor of the token embedding (Gemma).

    Raises:
        ValueError: a size is not positive, the head counts do not divide, or two choices exclude each other.
    """

    vocab_size: int
    max_context_length: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    position: PositionKind
    rope_theta: float
    norm: NormKind
    norm_eps: float
    mlp: MlpKind
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    attention: AttentionKind = AttentionKind.SOFTMAX
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    num_relative_buckets: int | None = None
    max_relative_distance: int | None = None
    sliding_window: int | None = None
    global_layers: tuple[int, ...] = ()
    score_scale: float | None = None
    attention_out_bias: bool | None = None
    qk_norm_scope: QkNormScope = QkNormScope.HEAD
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_bias: bool = True
    norm_unit_offset: bool = False
    parallel_residual: bool = False
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling.from_dict(self.rope_scaling))
        elif self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling must be an object with kind and factor, not {self.rope_scaling!r}")
        layers = self.global_layers
        if not isinstance(layers, (list, tuple)) or any(type(layer) is not int for layer in layers):
            raise ValueError(f"global_layers must be a list of layer numbers, not {layers!r}")
        object.__setattr__(self, "global_layers", tuple(self.global_layers))
        for field in dataclasses.fields(self):
            self._check_type(field.name, field.type)
        check_size("num_layers", self.num_layers, MAX_LAYERS)
        if self.attention_out_bias is None:
            object.__setattr__(self, "attention_out_bias", self.attention_bias)
        self._check_choices()

    def _check_type(self, name: str, hint: Any) -> None:
        """Check a field's value by the field's type. Replace the name of an enum member by the member."""
        value = getattr(self, name)
        if isinstance(hint, UnionType):
            if value is None:
                return
            hint = hint.__args__[0]
        if hint is int:
            check_size(name, value)
        elif hint is float:
            check_number(name, value)
        elif hint is bool and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {value!r}")
        elif issubclass(hint, StrEnum):
            object.__setattr__(self, name, check_member(name, value, hint))

    def _check_choices(self) -> None:
        """Check choices that require or exclude each other."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        rotary = self.position is PositionKind.ROTARY
        if rotary and (self.rotary_size % 2 or self.rotary_size > self.head_dim):
            name = "rotary_dim" if self.rotary_dim else "head_dim"
            raise ValueError(f"rotary positions need an even {name} up to head_dim, not {self.rotary_size}")
        in_scores = rotary or self.position in SCORED_POSITIONS
        if self.attention is AttentionKind.AVERAGE and (in_scores or self.qk_norm or self.score_scale is not None):
            raise ValueError("average attention has no scores; remove qk_norm, score_scale and positions in the scores")
        needed = {
            "num_relative_buckets": self.position is PositionKind.RELATIVE_BIAS,
            "max_relative_distance": self.position in (PositionKind.RELATIVE_BIAS, PositionKind.DISENTANGLED),
        }
        for name, is_needed in needed.items():
            if (getattr(self, name) is not None) != is_needed:
                raise ValueError(f"{name} must {'be' if is_needed else 'not be'} given for position={self.position}")
        buckets, farthest = self.num_relative_buckets, self.max_relative_distance
        if buckets is not None and farthest is not None and not 1 <= buckets // 2 < farthest:
            raise ValueError(
                "num_relative_buckets must be at least 2, and max_relative_distance over num_relative_buckets // 2"
            )
        for name in ("rotary_dim", "rope_scaling"):
            if getattr(self, name) is not None and not rotary:
                raise ValueError(f"{name} needs position=rotary, not {self.position}")
        if self.global_layers and self.sliding_window is None:
            raise ValueError("global_layers needs a sliding_window; set one, or remove global_layers")
        known = [layer for layer in dict.fromkeys(self.global_layers) if 0 <= layer < self.num_layers]
        if len(known) != len(self.global_layers):
            raise ValueError(
                f"global_layers must be layers from 0 to {self.num_layers - 1}, each once, not {self.global_layers}"
            )
        if self.norm_unit_offset and self.norm is not NormKind.RMS_NORM:
            raise ValueError("norm_unit_offset needs norm=rms_norm")
        if not self.norm_bias and self.norm is not NormKind.LAYER_NORM:
            raise ValueError("norm_bias=false needs norm=layer_norm")
        if self.parallel_residual and self.norm_placement is not NormPlacement.PRE:
            raise ValueError("parallel_residual needs norm_placement=pre")

    @property
    def num_queries_per_kv_head(self) -> int:
        """Return the number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_size(self) -> int:
        """Return how many dimensions of a head rotary positions rotate, counted from the first."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Return the dimension of a key: 0 for average attention, which has no keys."""
        return 0 if self.attention is AttentionKind.AVERAGE else self.head_dim

    @property
    def effective_score_scale(self) -> float:
        """Return the factor of q·k: 1/sqrt(d_k), so that scores vary as much as one component of q and k does.

        Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1. Disentangled scores are sums of three products, hence
        1/sqrt(3 d_k): He et al. 2020 (arXiv 2006.03654), equation 4.
        """
        if self.score_scale is not None:
            return self.score_scale
        num_products = 3 if self.position is PositionKind.DISENTANGLED else 1
        return float((num_products * self.head_dim) ** -0.5)

    @property
    def num_parameters(self) -> int:
        """Return the number of trainable parameters; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def window(self, layer: int) -> int | None:
        """Return how many positions a token of this layer sees, itself included; None for all."""
        return None if layer in self.global_layers else self.sliding_window

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of KV-cache per token of context: keys and values of all layers."""
        return self.num_layers * self.num_kv_heads * (self.key_dim + self.head_dim) * bytes_per_value

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of this model's checkpoint, in module order.

        The result equals the names and shapes of `Transformer(config).state_dict()`, without torch; a test compares the
        two. A checkpoint can thus be checked against its config before a tensor is read.
        """
        embed = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (self.vocab_size, embed)}
        match self.position:
            case PositionKind.LEARNED:
                shapes["position_embedding.weight"] = (self.max_context_length, embed)
            case PositionKind.RELATIVE_BIAS:
                assert self.num_relative_buckets is not None
                shapes["relative_positions.weight"] = (self.num_relative_buckets, self.num_heads)
            case PositionKind.DISENTANGLED:
                assert self.max_relative_distance is not None
                shapes["relative_positions.weight"] = (self.max_relative_distance, embed)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes |= self._norm_shapes(prefix + "attention_norm", embed)
            shapes |= self._attention_shapes(prefix + "attention.")
            shapes |= self._norm_shapes(prefix + "mlp_norm", embed)
            name, widened = ("gate_up", 2 * self.mlp_size) if self.mlp.gated else ("up", self.mlp_size)
            shapes |= _linear_shapes(f"{prefix}mlp.{name}", embed, widened, self.mlp_bias)
            shapes |= _linear_shapes(prefix + "mlp.down", self.mlp_size, embed, self.mlp_bias)
        shapes |= self._norm_shapes("final_norm", embed)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, embed)
        return shapes

    def _attention_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        embed, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.attention is AttentionKind.AVERAGE:
            shapes = _linear_shapes(prefix + "value", embed, key, self.attention_bias)
        else:
            shapes = _linear_shapes(prefix + "qkv", embed, query + 2 * key, self.attention_bias)
        shapes |= _linear_shapes(prefix + "out", query, embed, bool(self.attention_out_bias))
        if self.qk_norm:
            whole = self.qk_norm_scope is QkNormScope.PROJECTION
            shapes[prefix + "query_norm.weight"] = (query if whole else self.head_dim,)
            shapes[prefix + "key_norm.weight"] = (key if whole else self.head_dim,)
        if self.position is PositionKind.DISENTANGLED:
            shapes |= _linear_shapes(prefix + "bias.query", embed, query, False)
            shapes |= _linear_shapes(prefix + "bias.key", embed, key, False)
        return shapes

    def _norm_shapes(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
        if self.norm is NormKind.LAYER_NORM and self.norm_bias:
            shapes[f"{name}.bias"] = (size,)
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, from which `from_dict` makes an equal config."""
        return {**dataclasses.asdict(self), "global_layers": list(self.global_layers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a config. Fields of mechanisms that were added later have defaults.

        Raises:
            ValueError: a key is unknown or missing, or has an invalid value.
        """
        check_keys(cls, values, "model config")
        return cls(**values)


# Ten times the deepest models' layers. A limit is needed because every layer's tensors are listed before any is read.
MAX_LAYERS = 10_000


def _linear_shapes(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes
