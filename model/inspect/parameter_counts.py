"""Parameter counts of each part of a model, by formula and by the shapes of the part's tensors. Torch-free.

Letters: V vocabulary, n context, L layers, d width, h query heads, g key/value heads, d_k and d_v numbers of a key and
of a value, m width of the MLP, e experts of a layer, f width of an expert, b buckets of token distances (T5), r maximum
relative distance. D numbers of a key and of a value in global layers, M width of the MLP in layers that use another
layer's keys and values, p size of the vector that each layer gets for each token (Gemma 4).
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from model.config import ModelConfig
from model.config_enums import AttentionKind, NormKind, NormPlacement, PositionKind, QkNormScope

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}  # of the KV-cache, for tables
_FIELD_OF_LETTER = {
    "V": "vocab_size",
    "n": "max_context_length",
    "L": "num_layers",
    "d": "hidden_size",
    "h": "num_heads",
    "g": "num_kv_heads",
    "d_k": "head_dim",
    "d_v": "head_dim",
    "m": "mlp_size",
    "b": "num_relative_buckets",
    "r": "max_relative_distance",
    "D": "global_head_dim",
    "M": "kv_shared_mlp_size",
    "p": "layer_input_size",
}
# Reasons why a kind of position has no parameters.
_UNTRAINED_POSITIONS = {
    PositionKind.NONE: "only the causal mask distinguishes positions",
    PositionKind.SINUSOIDAL: "sinusoidal: fixed",
    PositionKind.ROTARY: "rotary: fixed angles",
    PositionKind.ALIBI: "ALiBi: fixed slopes",
}


@dataclass(frozen=True, slots=True)
class Formula:
    """Formula of a model's sizes, such as "d·(2·d_k + d_v)", with its value. is_sum: needs brackets in products."""

    text: str
    value: int
    is_sum: bool = False

    def __add__(self, other: "Formula") -> "Formula":
        return Formula(f"{self.text} + {other.text}", self.value + other.value, is_sum=True)

    def __mul__(self, other: "Formula") -> "Formula":
        return Formula(f"{self._factor}·{other._factor}", self.value * other.value)

    def __rmul__(self, number: int) -> "Formula":
        return Formula(str(number), number) * self

    @property
    def _factor(self) -> str:
        return f"({self.text})" if self.is_sum else self.text


_NOTHING = Formula("0", 0)


@dataclass(frozen=True, slots=True)
class PartCount:
    """Parameter counts of one part of a model, such as "W_Q" of the group "attention".

    formula: number of parameters in one layer, or in the model for a part outside of the layers (`is_outside`).
    tensors: names of the part's tensors, without the layer.
    share, shares: the part has `share` of `shares` equal pieces of a tensor that several parts share.
    note: reason why the part has no parameters.
    layers: layers with the part; None: all.
    num_places: number of layers with the part; 1 for a part outside of the layers.
    num_counted: number of parameters in the part's tensors, in all layers.
    """

    group: str
    name: str
    formula: Formula
    tensors: tuple[str, ...]
    share: int = 1
    shares: int = 1
    note: str = ""
    is_outside: bool = False
    layers: tuple[int, ...] | None = None
    num_places: int = 1
    num_counted: int = 0

    @property
    def by_formula(self) -> int:
        return self.formula.value * self.num_places

    @property
    def agrees(self) -> bool:
        return self.by_formula == self.num_counted


class Letters(SimpleNamespace):
    """Sizes of a model config as attributes V, d, h, ..., each a `Formula`; a size that the config lacks is 0."""

    def __init__(self, config: ModelConfig) -> None:
        sizes = {key: getattr(config, name) or 0 for key, name in _FIELD_OF_LETTER.items()}
        experts = config.experts
        sizes |= {"e": 0, "f": 0} if experts is None else {"e": experts.num, "f": experts.mlp_size}
        super().__init__(**{key: Formula(key, size) for key, size in sizes.items()})


def count_parameters(config: ModelConfig) -> list[PartCount]:
    """Return the parameter counts of every part of a model, by formula and, independently, by tensor shapes.

    Raises:
        ValueError: a tensor of the model belongs to no part.
    """
    sizes: dict[str, dict[int, int]] = {}  # by name without the layer, then by layer; -1: outside of the layers
    for tensor, shape in config.parameter_shapes().items():
        prefix = re.match(r"layers\.(\d+)\.", tensor)
        name, layer = (tensor, -1) if prefix is None else (tensor[prefix.end() :], int(prefix[1]))
        by_layer = sizes.setdefault(re.sub(r"(?<=\.experts\.)\d+\.", "", name), {})
        by_layer[layer] = by_layer.get(layer, 0) + math.prod(shape)
    parts = list(_parts(config))
    if strangers := sizes.keys() - {tensor for part in parts for tensor in part.tensors}:
        name = min(strangers)
        tensor = next(tensor for tensor in config.parameter_shapes() if tensor.endswith(name.rpartition("experts.")[2]))
        raise ValueError(
            f"tensor {tensor} belongs to no part of the model; add it to model/inspect/parameter_counts.py"
        )
    counted = []
    for part in parts:
        layers = (-1,) if part.is_outside else range(config.num_layers) if part.layers is None else part.layers
        number = sum(sizes.get(tensor, {}).get(layer, 0) for tensor in part.tensors for layer in layers)
        counted.append(
            dataclasses.replace(part, num_places=len(layers), num_counted=number * part.share // part.shares)
        )
    return counted


def attention_formulas(config: ModelConfig) -> list[tuple[str, Formula]]:
    """Return named formulas for numbers of attention parameters, from one head to all matrices of a layer.

    Biases and norms are not counted. The last formula is for a layer of this config that has keys of its own, and a
    window if any layer has one.

    Sources: Vaswani et al. 2017 (arXiv 1706.03762, section 3.2.2); for g key/value heads of h query heads Shazeer 2019
    (arXiv 1911.02150) and Ainslie et al. 2023 (arXiv 2305.13245).
    """
    at = Letters(config)
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
    """Return the usual name of a model's attention by the numbers of heads, such as "multi-query"."""
    if config.num_heads == 1:
        return "single-head"
    if config.num_kv_heads == config.num_heads:
        return "multi-head"
    return "multi-query" if config.num_kv_heads == 1 else "grouped-query"


def kv_cache_formula(config: ModelConfig, bytes_per_value: int) -> Formula:
    """Return the formula of KV-cache bytes per token, with its value: keys and values of all KV heads and layers.

    Average attention has no keys. The scales of an int8 cache are not counted, unlike in `kv_bytes_per_token`.
    """
    each = Formula(str(bytes_per_value), bytes_per_value)
    formulas = []
    for kind in _kinds_of_layers(config):
        if kind.has_keys:
            at = kind.letters
            count = at.L if len(kind.layers) == config.num_layers else Formula(str(len(kind.layers)), len(kind.layers))
            formulas.append(count * at.g * (at.d_v if config.attention is AttentionKind.AVERAGE else at.d_k + at.d_v))
    total: Formula = functools.reduce(operator.add, formulas) * each
    return total


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """Layers whose attention has the same sizes. name: such as "global, without keys"; empty for the usual layers.

    has_keys: the layers compute keys and values of their own.
    """

    name: str
    layers: tuple[int, ...]
    has_keys: bool
    letters: Letters


def _kinds_of_layers(config: ModelConfig) -> list[_LayerKind]:
    layers: dict[tuple[int, bool], list[int]] = {}
    for layer in range(config.num_layers):
        layers.setdefault((config.head_dim_of(layer), config.kv_source(layer) == layer), []).append(layer)
    kinds = []
    for (size, has_keys), numbers in layers.items():
        letters = Letters(config)
        if size != config.head_dim:
            letters.d_k = letters.d_v = letters.D
        words = ["global"] * (size != config.head_dim) + ["without keys"] * (not has_keys)
        kinds.append(_LayerKind(", ".join(words), tuple(numbers), has_keys, letters))
    return kinds


def _parts(config: ModelConfig) -> Iterator[PartCount]:
    at = Letters(config)
    yield PartCount("embedding", "tokens", at.V * at.d, ("token_embedding.weight",), is_outside=True)
    rows = (
        at.n if config.position_offset is None else at.n + Formula(str(config.position_offset), config.position_offset)
    )
    positions = {
        PositionKind.LEARNED: rows * at.d,
        PositionKind.RELATIVE_BIAS: at.b * at.h,  # Raffel et al. 2020, arXiv 1910.10683: one table for all layers
        PositionKind.DISENTANGLED: at.r * at.d,  # He et al. 2020, arXiv 2006.03654: one table for all layers
    }
    tables = ("position_embedding.weight", "relative_positions.weight")
    note = _UNTRAINED_POSITIONS.get(config.position, "")
    yield PartCount(
        "embedding", "positions", positions.get(config.position, _NOTHING), tables, note=note, is_outside=True
    )
    for kind in _kinds_of_layers(config):
        for part in _attention_parts(config, kind.letters, has_keys=kind.has_keys):
            name = f"{part.name}, {kind.name}" if kind.name else part.name
            yield dataclasses.replace(part, name=name, layers=kind.layers)
    yield from _mlp_parts(config, at)
    if config.layer_input_size is not None:
        yield from _layer_input_parts(at)
    norm = 2 * at.d if config.norm is NormKind.LAYER_NORM and config.norm_bias else at.d
    norms = {"of attention": "attention_norm"}
    if not config.shares_norm:
        norms |= {"of the mlp": "mlp_norm"}
    if config.norm_placement is NormPlacement.BOTH:
        norms |= {"after attention": "attention_out_norm", "after the mlp": "mlp_out_norm"}
    outside = {"of the embedding": "embedding_norm"} if config.embedding_norm else {}
    outside["final"] = "final_norm"
    for name, module in (norms | outside).items():
        tensors = (f"{module}.weight", f"{module}.bias")
        yield PartCount("norms", name, norm, tensors, is_outside=name in outside)
    if config.has_layer_scalar:
        yield PartCount("norms", "factor of x", Formula("1", 1), ("layer_scalar",))
    tied = "tied to the token embedding" if config.tie_embeddings else ""
    yield PartCount(
        "head", "output", _NOTHING if tied else at.V * at.d, ("lm_head.weight",), note=tied, is_outside=True
    )


def _layer_input_parts(at: Letters) -> Iterator[PartCount]:
    names = ("embedding", "projection", "norm")
    formulas = at.V * at.L * at.p, at.d * at.L * at.p, at.p
    for name, formula in zip(names, formulas, strict=True):
        tensors = (f"layer_inputs.{name}.weight",)
        yield PartCount("inputs", f"{name} of inputs", formula, tensors, is_outside=True)
    yield PartCount("inputs", "W_gate of input", at.d * at.p, ("layer_input.gate.weight",))
    yield PartCount("inputs", "W_out of input", at.p * at.d, ("layer_input.out.weight",))
    yield PartCount("inputs", "norm after input", at.d, ("layer_input.norm.weight",))


def _mlp_parts(config: ModelConfig, at: Letters) -> Iterator[PartCount]:
    layers: dict[int, list[int]] = {}  # by size
    sparse = []
    for layer in range(config.num_layers):
        if config.experts_of(layer) is None:
            layers.setdefault(config.mlp_size_of(layer), []).append(layer)
        else:
            sparse.append(layer)
    for size, numbers in layers.items():
        width, kind = (at.m, "") if size == config.mlp_size else (at.M, ", without keys")
        for part in _parts_of_mlp(config, at, width):
            yield dataclasses.replace(part, name=part.name + kind, layers=tuple(numbers))
    for part in _expert_parts(at) if sparse else ():
        yield dataclasses.replace(part, layers=tuple(sparse))


def _parts_of_mlp(config: ModelConfig, at: Letters, width: Formula) -> Iterator[PartCount]:
    widening = ("gate", "up") if config.mlp.gated else ("up",)
    fused = "mlp.gate_up" if config.mlp.gated else "mlp.up"
    for name in widening:
        yield PartCount("mlp", f"W_{name}", at.d * width, (f"{fused}.weight",), shares=len(widening))
    yield PartCount("mlp", "W_down", width * at.d, ("mlp.down.weight",))
    if config.mlp_bias:
        for name in widening:
            yield PartCount("mlp", f"b_{name}", width, (f"{fused}.bias",), shares=len(widening))
        yield PartCount("mlp", "b_down", at.d, ("mlp.down.bias",))


def _expert_parts(at: Letters) -> Iterator[PartCount]:
    yield PartCount("experts", "router", at.e * at.d, ("mlp.router.weight",))
    for name in ("gate", "up"):
        tensors = ("mlp.experts.gate_up.weight",)
        yield PartCount("experts", f"W_{name} of experts", at.e * at.d * at.f, tensors, shares=2)
    yield PartCount("experts", "W_down of experts", at.e * at.f * at.d, ("mlp.experts.down.weight",))


def _attention_parts(config: ModelConfig, at: Letters, *, has_keys: bool) -> Iterator[PartCount]:
    h, g = config.num_heads, config.num_kv_heads
    columns = {"Q": (at.h * at.d_k, h), "K": (at.g * at.d_k, g), "V": (at.g * at.d_v, g)}
    fused, shares = "attention.qkv", h + 2 * g
    if config.attention is AttentionKind.AVERAGE:
        for name in ("W_Q", "W_K"):
            yield PartCount("attention", name, _NOTHING, (), note="average attention has no scores")
        columns, fused, shares = {"V": (at.g * at.d_v, g)}, "attention.value", g
    if not has_keys:
        columns, shares = {"Q": columns["Q"]}, h
    for name, (width, share) in columns.items():
        yield PartCount("attention", f"W_{name}", at.d * width, (f"{fused}.weight",), share, shares)
    yield PartCount("attention", "W_O", at.h * at.d_v * at.d, ("attention.out.weight",))
    if config.attention_bias:
        for name, (width, share) in columns.items():
            yield PartCount("attention", f"b_{name}", width, (f"{fused}.bias",), share, shares)
    if config.attention_out_bias:
        yield PartCount("attention", "b_O", at.d, ("attention.out.bias",))
    if config.position is PositionKind.DISENTANGLED:
        yield PartCount("attention", "W_Q of distances", at.d * at.h * at.d_k, ("attention.bias.query.weight",))
        yield PartCount("attention", "W_K of distances", at.d * at.g * at.d_k, ("attention.bias.key.weight",))
    if config.qk_norm:
        whole = config.qk_norm_scope is QkNormScope.PROJECTION
        yield PartCount("attention", "norm of q", at.h * at.d_k if whole else at.d_k, ("attention.query_norm.weight",))
        if not has_keys:
            return
        yield PartCount("attention", "norm of k", at.g * at.d_k if whole else at.d_k, ("attention.key_norm.weight",))
