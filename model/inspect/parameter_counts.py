"""Parameters of each part of a model, by closed formula and counted from the shapes of its tensors. Torch-free.

The two ways share nothing but the config. Formulas are written here from the literature, and counts come from
`ModelConfig.parameter_shapes()`, tensor by tensor.

Letters: V vocabulary, n context, L layers, d width, h query heads, g key/value heads, d_k and d_v numbers of a key and
of a value, m width of the MLP, b buckets of distances, r maximum relative distance.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from model.config import ModelConfig
from model.config_enums import AttentionKind, NormKind, PositionKind, QkNormScope
from model.inspect.formula import Formula


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCount:
    """Parameters of one part, in all layers that have the part.

    group, name: "attention", "W_Q".
    formula: parameters per layer, or in total for a part outside the layers.
    num_places: number of layers that have the part, or 1.
    num_counted: counted from the tensors, in all layers.
    note: why the part has no parameters, if it has none.
    """

    group: str
    name: str
    formula: Formula
    num_places: int
    num_counted: int
    note: str

    @property
    def by_formula(self) -> int:
        """Return the formula's value for all layers."""
        return self.formula.value * self.num_places

    @property
    def agrees(self) -> bool:
        """Return whether the formula and the tensors give the same number."""
        return self.by_formula == self.num_counted


@dataclass(frozen=True, slots=True)
class Letters:
    """Sizes of one config under their letters."""

    V: Formula
    n: Formula
    L: Formula
    d: Formula
    h: Formula
    g: Formula
    d_k: Formula
    d_v: Formula
    m: Formula
    b: Formula
    r: Formula

    @classmethod
    def of(cls, config: ModelConfig) -> "Letters":
        """Read the sizes from a config; a size that the config lacks is 0."""
        values = {
            "V": config.vocab_size,
            "n": config.max_context_length,
            "L": config.num_layers,
            "d": config.hidden_size,
            "h": config.num_heads,
            "g": config.num_kv_heads,
            "d_k": config.head_dim,
            "d_v": config.head_dim,
            "m": config.mlp_size,
            "b": 0 if config.num_relative_buckets is None else config.num_relative_buckets,
            "r": 0 if config.max_relative_distance is None else config.max_relative_distance,
        }
        return cls(**{letter: Formula(letter, value) for letter, value in values.items()})


def count_parameters(config: ModelConfig) -> list[PartCount]:
    """Return every part of the model, in the order of its layers; the counts add up to `config.num_parameters`.

    Raises:
        ValueError: a tensor belongs to no part.
    """
    counted = _count_tensors(config)
    rows = [*_embedding_rows(config), *_attention_rows(config), *_mlp_rows(config), *_norm_rows(config)]
    tied = "the token embedding does both" if config.tie_embeddings else ""
    letters = Letters.of(config)
    rows.append(_Row("head", "output", None if tied else letters.V * letters.d, note=tied, once=True))
    return [
        PartCount(
            group=row.group,
            name=row.name,
            formula=Formula.number(0) if row.formula is None else row.formula,
            num_places=1 if row.once else config.num_layers,
            num_counted=counted[row.name],
            note=row.note,
        )
        for row in rows
    ]


def attention_formulas(config: ModelConfig) -> list[tuple[str, Formula]]:
    """Return formulas from one head to the matrices of a layer, biases aside.

    A head has W_Q and W_K of d·d_k and W_V of d·d_v (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2). W_O mixes
    the outputs of h heads. g key/value heads may serve h query heads (Shazeer 2019, arXiv 1911.02150; Ainslie et al.
    2023, arXiv 2305.13245). Average attention compares nothing and so has no W_Q and no W_K.
    """
    at = Letters.of(config)
    if config.attention is AttentionKind.AVERAGE:
        name = "this layer: averages" if config.num_queries_per_kv_head == 1 else "this layer: averages, shared"
        return [("one head", at.d * at.d_v), (name, at.d * at.g * at.d_v + at.h * at.d_v * at.d)]
    one = at.d * (2 * at.d_k + at.d_v)
    whole = at.h * one
    mixed = at.h * at.d_v * at.d
    shared = at.d * (at.h * at.d_k + at.g * (at.d_k + at.d_v)) + mixed
    if config.position is PositionKind.DISENTANGLED:
        shared = shared + at.d * at.h * at.d_k + at.d * at.g * at.d_k
    return [
        ("one head", one),
        ("h heads", whole),
        ("h heads and W_O", whole + mixed),
        (f"this layer: {attention_name(config)}", shared),
    ]


def attention_name(config: ModelConfig) -> str:
    """Return the usual name of the config's head counts."""
    if config.num_heads == 1:
        return "single-head"
    if config.num_kv_heads == config.num_heads:
        return "multi-head"
    return "multi-query" if config.num_kv_heads == 1 else "grouped-query"


def kv_cache_formula(config: ModelConfig, bytes_per_value: int) -> Formula:
    """Return the bytes of KV-cache per token of context.

    Every layer and key/value head stores a value and, except with average attention, a key.
    """
    at = Letters.of(config)
    keys_and_values = at.d_v if config.attention is AttentionKind.AVERAGE else at.d_k + at.d_v
    return at.L * at.g * keys_and_values * Formula.number(bytes_per_value)


@dataclass(frozen=True, slots=True)
class _Row:
    group: str
    name: str
    formula: Formula | None
    note: str = ""
    once: bool = False


# Reasons why a kind of position has no parameters.
_UNTRAINED_POSITIONS = {
    PositionKind.NONE: "only the causal mask tells positions",
    PositionKind.SINUSOIDAL: "sinusoidal: fixed",
    PositionKind.ROTARY: "rotary: fixed angles",
    PositionKind.ALIBI: "ALiBi: fixed slopes",
}


def _embedding_rows(config: ModelConfig) -> Iterator[_Row]:
    at = Letters.of(config)
    yield _Row("embedding", "tokens", at.V * at.d, once=True)
    formulas = {
        PositionKind.LEARNED: at.n * at.d,
        PositionKind.RELATIVE_BIAS: at.b * at.h,  # Raffel et al. 2020, arXiv 1910.10683: one table for all layers
        PositionKind.DISENTANGLED: at.r * at.d,  # He et al. 2020, arXiv 2006.03654: likewise
    }
    note = _UNTRAINED_POSITIONS.get(config.position, "")
    yield _Row("embedding", "positions", formulas.get(config.position), note=note, once=True)


def _attention_rows(config: ModelConfig) -> Iterator[_Row]:
    at = Letters.of(config)
    average = config.attention is AttentionKind.AVERAGE
    nothing = "averages compare nothing" if average else ""
    yield _Row("attention", "W_Q", None if average else at.d * at.h * at.d_k, note=nothing)
    yield _Row("attention", "W_K", None if average else at.d * at.g * at.d_k, note=nothing)
    yield _Row("attention", "W_V", at.d * at.g * at.d_v)
    yield _Row("attention", "W_O", at.h * at.d_v * at.d)
    if config.attention_bias:
        if not average:
            yield _Row("attention", "b_Q", at.h * at.d_k)
            yield _Row("attention", "b_K", at.g * at.d_k)
        yield _Row("attention", "b_V", at.g * at.d_v)
    if config.attention_out_bias:
        yield _Row("attention", "b_O", at.d)
    if config.position is PositionKind.DISENTANGLED:
        yield _Row("attention", "W_Q of distances", at.d * at.h * at.d_k)
        yield _Row("attention", "W_K of distances", at.d * at.g * at.d_k)
    if config.qk_norm:
        whole = config.qk_norm_scope is QkNormScope.PROJECTION
        yield _Row("attention", "norm of q", at.h * at.d_k if whole else at.d_k)
        yield _Row("attention", "norm of k", at.g * at.d_k if whole else at.d_k)


def _mlp_rows(config: ModelConfig) -> Iterator[_Row]:
    at = Letters.of(config)
    widening = ("gate", "up") if config.mlp.gated else ("up",)
    for name in widening:
        yield _Row("mlp", f"W_{name}", at.d * at.m)
    yield _Row("mlp", "W_down", at.m * at.d)
    if config.mlp_bias:
        for name in widening:
            yield _Row("mlp", f"b_{name}", at.m)
        yield _Row("mlp", "b_down", at.d)


def _norm_rows(config: ModelConfig) -> Iterator[_Row]:
    at = Letters.of(config)
    biased = config.norm is NormKind.LAYER_NORM and config.norm_bias
    one = 2 * at.d if biased else at.d
    yield _Row("norms", "of attention", one)
    yield _Row("norms", "of the mlp", one)
    yield _Row("norms", "final", one, once=True)


def _count_tensors(config: ModelConfig) -> Counter[str]:
    """Count parameters by row name, from shapes alone. A fused tensor is divided among its parts."""
    h, g = config.num_heads, config.num_kv_heads
    fused: dict[str, dict[str, int]] = {
        "attention.qkv.weight": {"W_Q": h, "W_K": g, "W_V": g},
        "attention.qkv.bias": {"b_Q": h, "b_K": g, "b_V": g},
        "mlp.gate_up.weight": {"W_gate": 1, "W_up": 1},
        "mlp.gate_up.bias": {"b_gate": 1, "b_up": 1},
    }
    counted: Counter[str] = Counter()
    for tensor, shape in config.parameter_shapes().items():
        name = re.sub(r"^layers\.\d+\.", "", tensor)
        if name not in fused and name not in _ROW_OF_TENSOR:
            raise ValueError(f"tensor {tensor} belongs to no part of the model; add it to _ROW_OF_TENSOR")
        shares = fused[name] if name in fused else {_ROW_OF_TENSOR[name]: 1}
        rows, whole = shape[0], sum(shares.values())
        for row, share in shares.items():
            counted[row] += rows // whole * share * math.prod(shape[1:])
    return counted


_ROW_OF_TENSOR = {
    "token_embedding.weight": "tokens",
    "position_embedding.weight": "positions",
    "relative_positions.weight": "positions",
    "attention.value.weight": "W_V",
    "attention.value.bias": "b_V",
    "attention.out.weight": "W_O",
    "attention.out.bias": "b_O",
    "attention.bias.query.weight": "W_Q of distances",
    "attention.bias.key.weight": "W_K of distances",
    "attention.query_norm.weight": "norm of q",
    "attention.key_norm.weight": "norm of k",
    "attention_norm.weight": "of attention",
    "attention_norm.bias": "of attention",
    "mlp_norm.weight": "of the mlp",
    "mlp_norm.bias": "of the mlp",
    "mlp.up.weight": "W_up",
    "mlp.up.bias": "b_up",
    "mlp.down.weight": "W_down",
    "mlp.down.bias": "b_down",
    "final_norm.weight": "final",
    "final_norm.bias": "final",
    "lm_head.weight": "output",
}
