"""ModelConfig: a frozen description of a model's mechanisms and of every tensor's shape. Torch-free."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Any, Self

from model.config_enums import (
    MAX_EXPERTS,
    SCORED_POSITIONS,
    AttentionKind,
    Experts,
    MlpKind,
    NormKind,
    NormPlacement,
    PositionKind,
    QkNormScope,
    RopeScaling,
    RopeScalingKind,
    check_keys,
    check_member,
    check_number,
    check_size,
    checked_layers,
)

# Ten times the deepest models' layers. A limit is needed because every layer's tensors are listed before any is read.
MAX_LAYERS = 10_000
_LAYER_LISTS = ("global_layers", "unrotated_layers")  # fields that are lists of layer numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Complete description of a decoder-only transformer. Raises ValueError for invalid or contradictory fields.

    num_kv_heads: key/value heads: as many as num_heads (multi-head), one (multi-query) or fewer (grouped-query).
    rope_theta: base of rotary frequencies.
    local_rope_theta: base of rotary frequencies in layers with a sliding window, where they are not scaled (Gemma 3);
        None: all layers have rope_theta and rope_scaling.
    rotary_dim: rotated dimensions of a head; None: the whole head.
    num_relative_buckets: number of buckets of token distances in a relative bias (T5).
    position_offset: row of the learned position embedding that position 0 has (OPT); None: row 0.
    max_relative_distance: larger token distances count as this distance, in a relative bias and in disentangled scores.
    sliding_window: a token sees itself and the `sliding_window - 1` tokens before it, except in `global_layers`.
    score_scale: factor of q·k before the softmax; None: 1/sqrt(head_dim), see `effective_score_scale`.
    score_growth, score_growth_interval: g and n in the factor 1 + g * ln(1 + floor(p / n)) of the scores of a query at
        position p (Llama 4, Ministral 3); None: no factor.
    score_soft_cap: bound c of the scores, which become c * tanh(score / c) (Gemma 2); None: no bound.
    logit_soft_cap: bound of the logits, in the same way; None: no bound.
    attention_bias: queries, keys and values have biases.
    attention_out_bias: the output projection has a bias; None for the value of attention_bias.
    qk_norm_after_rotation: queries and keys are normed after their rotation, not before (Hunyuan).
    norm_unit_offset: RMS norms multiply by 1 + weight (Gemma), also the norms of queries and keys (Gemma 3).
    experts: mixture of experts in place of the MLP, except in its `dense_layers`; None: every layer has a single MLP.
    parallel_residual: attention and MLP read the same x and are added to it together (GPT-NeoX).
    shares_norm: attention and MLP of a parallel layer read x normed by one norm (Falcon 7B, Cohere).
    embedding_scale: factor of the token embedding (Gemma).
    embedding_norm: the token embedding is normed (Bloom).
    unrotated_layers: layers without positions, in a model with rotary positions (SmolLM3).
    global_head_dim: dimension of a head in `global_layers` (Gemma 4); None: head_dim.
    value_norm: values are normed per head, by an RMS norm without weight (Gemma 4).
    num_kv_shared_layers: number of layers at the end that compute only queries. They read the keys and values of the
        last earlier layer of the same kind, with or without a window (Gemma 4); None: no layer does.
    kv_shared_mlp_size: MLP size of these layers; None: mlp_size.
    layer_input_size: size of the vector that each layer gets for each token, from a second embedding (Gemma 4).
    has_layer_scalar: the output of each layer is multiplied by a stored number (Gemma 4).
    logit_divisor: divisor of all logits (Granite).
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
    local_rope_theta: float | None = None
    position_offset: int | None = None
    num_relative_buckets: int | None = None
    max_relative_distance: int | None = None
    sliding_window: int | None = None
    global_layers: tuple[int, ...] = ()
    score_scale: float | None = None
    score_growth: float | None = None
    score_growth_interval: int | None = None
    score_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    attention_out_bias: bool | None = None
    qk_norm_scope: QkNormScope = QkNormScope.HEAD
    qk_norm_after_rotation: bool = False
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_bias: bool = True
    norm_unit_offset: bool = False
    experts: Experts | None = None
    parallel_residual: bool = False
    shares_norm: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    unrotated_layers: tuple[int, ...] = ()
    global_head_dim: int | None = None
    value_norm: bool = False
    num_kv_shared_layers: int | None = None
    kv_shared_mlp_size: int | None = None
    layer_input_size: int | None = None
    has_layer_scalar: bool = False
    logit_divisor: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling.from_dict(self.rope_scaling))
        elif self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(f"rope_scaling must be an object with kind and factor, not {self.rope_scaling!r}")
        if isinstance(self.experts, Mapping):
            object.__setattr__(self, "experts", Experts.from_dict(self.experts))
        elif self.experts is not None and not isinstance(self.experts, Experts):
            raise ValueError(f"experts must be an object, not {self.experts!r}")
        for name in _LAYER_LISTS:
            object.__setattr__(self, name, checked_layers(name, getattr(self, name)))
        for field in dataclasses.fields(self):
            self._check_type(field.name, field.type)
        check_size("num_layers", self.num_layers, MAX_LAYERS)
        if self.attention_out_bias is None:
            object.__setattr__(self, "attention_out_bias", self.attention_bias)
        self._check_choices()
        self._check_kinds_of_layers()

    def _check_type(self, name: str, hint: Any) -> None:
        """Raise ValueError if a value does not fit its field's type; replace an enum member's name by the member."""
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
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        rotary = self.position is PositionKind.ROTARY
        if rotary and (self.rotary_size % 2 or self.rotary_size > self.head_dim):
            name = "rotary_dim" if self.rotary_dim else "head_dim"
            raise ValueError(f"rotary positions need an even {name} up to head_dim, not {self.rotary_size}")
        in_scores = rotary or self.position in SCORED_POSITIONS
        changes_scores = self.qk_norm or self.score_scale is not None or self.score_soft_cap is not None
        if self.attention is AttentionKind.AVERAGE and (in_scores or changes_scores):
            raise ValueError(
                "attention=average weights all tokens equally, without scores; remove qk_norm, score_scale and "
                "score_soft_cap, and choose position none, learned or sinusoidal"
            )
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
                "num_relative_buckets must be at least 2, and max_relative_distance more than num_relative_buckets // 2"
            )
        self._check_layers()
        self._check_rope_scaling()
        if (self.score_growth is None) != (self.score_growth_interval is None):
            raise ValueError("the model's config has only one of score_growth and score_growth_interval; add the other")
        self._check_requirements()

    def _check_requirements(self) -> None:
        """Raise ValueError if a field is given that the value of another field does not allow."""
        rotary = self.position is PositionKind.ROTARY
        has_local_theta = self.local_rope_theta is not None
        for name, is_given, is_possible, requirement in (
            ("rotary_dim", self.rotary_dim is not None, rotary, "position=rotary"),
            ("rope_scaling", self.rope_scaling is not None, rotary, "position=rotary"),
            (
                "rope_scaling of kind dynamic",
                self.rope_scaling is not None and self.rope_scaling.kind is RopeScalingKind.DYNAMIC,
                self.rotary_size > 2,
                "more than two rotated dimensions",
            ),
            ("unrotated_layers", self.unrotated_layers, rotary, "position=rotary"),
            (
                "position_offset",
                self.position_offset is not None,
                self.position is PositionKind.LEARNED,
                "position=learned",
            ),
            (
                "local_rope_theta",
                has_local_theta,
                rotary and self.sliding_window is not None,
                "rotary positions and a sliding_window",
            ),
            (
                "qk_norm_after_rotation",
                self.qk_norm_after_rotation,
                self.qk_norm and rotary,
                "qk_norm and position=rotary",
            ),
            (
                "score_growth",
                self.score_growth is not None,
                rotary and self.rotary_size == self.head_dim and self.local_rope_theta is None,
                "position=rotary, without rotary_dim and local_rope_theta",
            ),
            ("global_layers", self.global_layers, self.sliding_window is not None, "a sliding_window"),
            ("experts", self.experts, self.mlp.gated and not self.mlp_bias, "a gated mlp without biases"),
            ("experts", self.experts, self.is_sequential, "norm_placement=pre and parallel_residual=false"),
            ("norm_unit_offset", self.norm_unit_offset, self.norm is NormKind.RMS_NORM, "norm=rms_norm"),
            ("norm_bias=false", not self.norm_bias, self.norm is NormKind.LAYER_NORM, "norm=layer_norm"),
            (
                "parallel_residual",
                self.parallel_residual,
                self.norm_placement is NormPlacement.PRE,
                "norm_placement=pre",
            ),
            ("shares_norm", self.shares_norm, self.parallel_residual, "parallel_residual"),
        ):
            if is_given and not is_possible:
                raise ValueError(f"{name} needs {requirement}; correct one of the two")

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        num_frequencies = self.rotary_size // 2
        for name in ("short_divisors", "long_divisors"):
            divisors = getattr(scaling, name)
            if divisors is not None and len(divisors) != num_frequencies:
                raise ValueError(
                    f"rope_scaling {name} has length {len(divisors)}, but the model has {num_frequencies} rotary "
                    "frequencies; give one divisor for each"
                )
        if scaling.kind is RopeScalingKind.YARN and self.rope_theta <= 1:
            raise ValueError(f"rope_scaling of kind yarn needs a rope_theta above 1, not {self.rope_theta}")

    def _check_kinds_of_layers(self) -> None:
        """Raise ValueError if the fields about layers of different sizes and shared keys contradict each other."""
        if self.global_head_dim is not None and (
            self.local_rope_theta is None or self.rotary_dim is not None or self.global_head_dim % 2
        ):
            raise ValueError(
                f"global_head_dim={self.global_head_dim} needs three things: an even value, local_rope_theta, and no "
                "rotary_dim, because global and local layers rotate heads of different sizes; correct these fields"
            )
        if self.layer_input_size is not None and self.norm is not NormKind.RMS_NORM:
            raise ValueError(
                f"layer_input_size needs norm=rms_norm, not {self.norm}; correct norm, or remove layer_input_size"
            )
        uses_keys = self.attention is AttentionKind.SOFTMAX and self.position is not PositionKind.DISENTANGLED
        if (self.value_norm or self.num_kv_shared_layers is not None) and not uses_keys:
            raise ValueError(
                "value_norm and num_kv_shared_layers need attention=softmax and a position other than disentangled; "
                "correct attention or position, or remove value_norm and num_kv_shared_layers"
            )
        if self.num_kv_shared_layers is None:
            if self.kv_shared_mlp_size is not None:
                raise ValueError("kv_shared_mlp_size needs num_kv_shared_layers; remove kv_shared_mlp_size")
            return
        first = max(0, self.num_layers - self.num_kv_shared_layers)
        if not {self.window(layer) is None for layer in range(first, self.num_layers)} <= self._kv_sources.keys():
            raise ValueError(
                f"num_kv_shared_layers={self.num_kv_shared_layers} leaves no earlier layer of the same kind (with or "
                "without a window) whose keys and values the last layers can use; decrease it"
            )

    def _check_layers(self) -> None:
        """Raise ValueError for a list with a layer twice or out of range, and for too many experts in all layers."""
        layer_lists = {name: getattr(self, name) for name in _LAYER_LISTS}
        if self.experts is not None:
            layer_lists["experts dense_layers"] = self.experts.dense_layers
            if (count := self.num_layers * self.experts.num) > MAX_EXPERTS:
                raise ValueError(f"{count:,} experts, but at most {MAX_EXPERTS:,} are supported; use a smaller model")
        for name, layers in layer_lists.items():
            if len([layer for layer in dict.fromkeys(layers) if 0 <= layer < self.num_layers]) != len(layers):
                raise ValueError(f"{name} must list layers from 0 to {self.num_layers - 1}, none twice, not {layers}")

    @property
    def num_queries_per_kv_head(self) -> int:
        """Return the number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_sequential(self) -> bool:
        """Return True if a layer computes x += attention(norm(x)), then x += mlp(norm(x))."""
        return self.norm_placement is NormPlacement.PRE and not self.parallel_residual

    @property
    def rotary_size(self) -> int:
        """Return the number of dimensions of a head, from the first on, that rotary positions rotate.

        The layers `global_layers` rotate `global_head_dim` dimensions instead, if that field is given.
        """
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Return the dimension of an attention key: 0 for average attention, which has no keys."""
        return 0 if self.attention is AttentionKind.AVERAGE else self.head_dim

    @property
    def effective_score_scale(self) -> float:
        """Return the factor of q·k before the softmax: by default 1/sqrt(head_dim) (arXiv 1706.03762, section 3.2.1).

        Disentangled scores are sums of three products, hence 1/sqrt(3 head_dim) (arXiv 2006.03654, equation 4).
        """
        if self.score_scale is not None:
            return self.score_scale
        num_products = 3 if self.position is PositionKind.DISENTANGLED else 1
        return float((num_products * self.head_dim) ** -0.5)

    @property
    def num_parameters(self) -> int:
        """Return the number of the model's trainable parameters; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    @property
    def largest_head_dim(self) -> int:
        """Return the largest dimension of a head in any layer."""
        return max(self.head_dim, self.global_head_dim or 0)

    @property
    def largest_mlp_size(self) -> int:
        """Return the largest size of an MLP in any layer."""
        return max(self.mlp_size, self.kv_shared_mlp_size or 0)

    def head_dim_of(self, layer: int) -> int:
        """Return the dimension of a head in one layer."""
        return self.global_head_dim if self.global_head_dim and layer in self.global_layers else self.head_dim

    def mlp_size_of(self, layer: int) -> int:
        """Return the inner width (F) of one layer's MLP."""
        size = self.mlp_size if self.kv_source(layer) == layer else self.kv_shared_mlp_size
        return self.mlp_size if size is None else size

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads: itself, or an earlier layer with the same `window`."""
        if self.num_kv_shared_layers is None or layer < self.num_layers - self.num_kv_shared_layers:
            return layer
        return self._kv_sources[self.window(layer) is None]

    @property
    def kv_shared_layers(self) -> tuple[int, ...]:
        """Return the layers whose keys and values later layers may read."""
        return () if self.num_kv_shared_layers is None else tuple(self._kv_sources.values())

    @property
    def _kv_sources(self) -> dict[bool, int]:
        """Return the number of the layer whose keys and values later layers read, by whether layers have no window."""
        first = self.num_layers - (self.num_kv_shared_layers or 0)
        return _last_layers(first, self.global_layers, self.sliding_window is not None)

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a token of a layer sees, itself included; None for all."""
        return None if layer in self.global_layers else self.sliding_window

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer; None for a layer with a single MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def for_context(self, length: int) -> Self:
        """Return this config, with `max_context_length` = `length` if rotary frequencies depend on the served context.

        They do with rope scaling of kind longrope or dynamic. All other configs are returned unchanged.
        """
        kind = None if self.rope_scaling is None else self.rope_scaling.kind
        if kind not in (RopeScalingKind.LONGROPE, RopeScalingKind.DYNAMIC):
            return self
        return dataclasses.replace(self, max_context_length=length)

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the KV-cache bytes per token: keys and values of all layers that have keys and values of their own.

        One byte per value means int8: each key and each value has a float32 scale, which is counted too.
        """
        owners = [layer for layer in range(self.num_layers) if self.kv_source(layer) == layer]
        return sum(self.kv_bytes_of(layer, bytes_per_value) for layer in owners)

    def kv_bytes_of(self, layer: int, bytes_per_value: int) -> int:
        """Return the bytes per token of the keys and values that a layer reads: its own, or an earlier layer's."""
        scale_bytes = 2 * 4 if bytes_per_value == 1 else 0
        num_vectors = 1 if self.attention is AttentionKind.AVERAGE else 2
        return self.num_kv_heads * (num_vectors * self.head_dim_of(layer) * bytes_per_value + scale_bytes)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor in `Transformer(config).state_dict()`, in order, without torch."""
        embed = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (self.vocab_size, embed)}
        if self.embedding_norm:
            shapes |= self._norm_shapes("embedding_norm", embed)
        match self.position:
            case PositionKind.LEARNED:
                shapes["position_embedding.weight"] = (self.max_context_length + (self.position_offset or 0), embed)
            case PositionKind.RELATIVE_BIAS:
                assert self.num_relative_buckets is not None
                shapes["relative_positions.weight"] = (self.num_relative_buckets, self.num_heads)
            case PositionKind.DISENTANGLED:
                assert self.max_relative_distance is not None
                shapes["relative_positions.weight"] = (self.max_relative_distance, embed)
        if self.layer_input_size is not None:
            inputs = self.num_layers * self.layer_input_size
            shapes["layer_inputs.embedding.weight"] = (self.vocab_size, inputs)
            shapes["layer_inputs.projection.weight"] = (inputs, embed)
            shapes["layer_inputs.norm.weight"] = (self.layer_input_size,)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            if self.has_layer_scalar:
                shapes[prefix + "layer_scalar"] = (1,)
            shapes |= self._norm_shapes(prefix + "attention_norm", embed)
            shapes |= self._attention_shapes(prefix + "attention.", layer)
            if not self.shares_norm:
                shapes |= self._norm_shapes(prefix + "mlp_norm", embed)
            if self.norm_placement is NormPlacement.BOTH:
                shapes |= self._norm_shapes(prefix + "attention_out_norm", embed)
                shapes |= self._norm_shapes(prefix + "mlp_out_norm", embed)
            if (experts := self.experts_of(layer)) is None:
                shapes |= self._mlp_shapes(prefix + "mlp", self.mlp_size_of(layer))
            else:
                shapes |= _linear_shapes(prefix + "mlp.router", embed, experts.num, False)
                for number in range(experts.num):
                    shapes |= self._mlp_shapes(f"{prefix}mlp.experts.{number}", experts.mlp_size)
            if self.layer_input_size is not None:
                shapes |= _linear_shapes(prefix + "layer_input.gate", embed, self.layer_input_size, False)
                shapes |= _linear_shapes(prefix + "layer_input.out", self.layer_input_size, embed, False)
                shapes |= self._norm_shapes(prefix + "layer_input.norm", embed)
        shapes |= self._norm_shapes("final_norm", embed)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, embed)
        return shapes

    def _attention_shapes(self, prefix: str, layer: int) -> dict[str, tuple[int, ...]]:
        embed, head_dim, has_keys = self.hidden_size, self.head_dim_of(layer), self.kv_source(layer) == layer
        query, key = self.num_heads * head_dim, self.num_kv_heads * head_dim if has_keys else 0
        if self.attention is AttentionKind.AVERAGE:
            shapes = _linear_shapes(prefix + "value", embed, key, self.attention_bias)
        else:
            shapes = _linear_shapes(prefix + "qkv", embed, query + 2 * key, self.attention_bias)
        shapes |= _linear_shapes(prefix + "out", query, embed, bool(self.attention_out_bias))
        if self.qk_norm:
            whole = self.qk_norm_scope is QkNormScope.PROJECTION
            shapes[prefix + "query_norm.weight"] = (query if whole else head_dim,)
            if has_keys:
                shapes[prefix + "key_norm.weight"] = (key if whole else head_dim,)
        if self.position is PositionKind.DISENTANGLED:
            shapes |= _linear_shapes(prefix + "bias.query", embed, query, False)
            shapes |= _linear_shapes(prefix + "bias.key", embed, key, False)
        return shapes

    def _mlp_shapes(self, prefix: str, size: int) -> dict[str, tuple[int, ...]]:
        name, widened = ("gate_up", 2 * size) if self.mlp.gated else ("up", size)
        shapes = _linear_shapes(f"{prefix}.{name}", self.hidden_size, widened, self.mlp_bias)
        return shapes | _linear_shapes(f"{prefix}.down", size, self.hidden_size, self.mlp_bias)

    def _norm_shapes(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
        if self.norm is NormKind.LAYER_NORM and self.norm_bias:
            shapes[f"{name}.bias"] = (size,)
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a JSON-ready dictionary, from which `from_dict` makes an equal config."""
        return {**dataclasses.asdict(self), **{name: list(getattr(self, name)) for name in _LAYER_LISTS}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a config from a dictionary. Raises ValueError for an unknown or missing key, or an invalid value."""
        check_keys(cls, values, "model config")
        return cls(**values)


@functools.lru_cache
def _last_layers(end: int, global_layers: tuple[int, ...], has_windows: bool) -> dict[bool, int]:
    """Return the last layer before `end` without a window (key True), and with one (False). A key may be absent."""
    without_window = set(global_layers)
    return {not has_windows or layer in without_window: layer for layer in range(end)}


def _linear_shapes(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes
