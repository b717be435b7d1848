"""Enums of the choices in a `ModelConfig`, its rotary scaling and experts, and checks of field values. Torch-free."""

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class AttentionKind(StrEnum):
    """Kind of attention: weights by scores of queries and keys, or equal weights."""

    SOFTMAX = "softmax"  # softmax of scaled dot products of queries and keys
    AVERAGE = "average"  # the same weight for every visible token: no queries, no keys


class PositionKind(StrEnum):
    """Kind of position encoding."""

    NONE = "none"  # only the causal mask distinguishes positions
    LEARNED = "learned"  # one trained vector per position, added to the embedding (GPT-2)
    SINUSOIDAL = "sinusoidal"  # one fixed vector per position, added to the embedding (the first Transformer)
    ROTARY = "rotary"  # queries and keys rotated by an angle that grows with the position (RoFormer)
    RELATIVE_BIAS = "relative_bias"  # a trained number for each bucket of distances, added to the scores (T5)
    ALIBI = "alibi"  # a fixed slope times the distance, subtracted from the scores (ALiBi)
    DISENTANGLED = "disentangled"  # content attends to positions and positions to content (DeBERTa)


# Positions that act in the scores of queries and keys, by `model.attention.score_biases`.
SCORED_POSITIONS = (PositionKind.RELATIVE_BIAS, PositionKind.ALIBI, PositionKind.DISENTANGLED)


class NormKind(StrEnum):
    """Kind of normalization of activations."""

    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"


class NormPlacement(StrEnum):
    """Placement of the norms of a transformer block, relative to attention and MLP."""

    PRE = "pre"  # x + f(norm(x))
    POST = "post"  # x + norm(f(x)) (OLMo 2)
    BOTH = "both"  # x + norm(f(norm(x))) (Gemma 2)


class QkNormScope(StrEnum):
    """Scope of the RMS norm of queries and keys in attention."""

    HEAD = "head"  # each head alone, one weight for all of them (Qwen3)
    PROJECTION = "projection"  # all heads at once (OLMo 2)


class MlpKind(StrEnum):
    """Kind of a transformer block's MLP: down(f(up(x))), or gated down(f(gate(x)) * up(x))."""

    GELU = "gelu"  # the tanh form of GELU (GPT-2)
    GELU_EXACT = "gelu_exact"  # x * Phi(x) (GPT-NeoX, nanoGPT)
    RELU = "relu"
    SWIGLU = "swiglu"  # gated, f = SiLU (Llama)
    GEGLU = "geglu"  # gated, f = GELU in its tanh form (Gemma)

    @property
    def gated(self) -> bool:
        """Return True if the MLP has a gate matrix."""
        return self in (MlpKind.SWIGLU, MlpKind.GEGLU)


class RopeScalingKind(StrEnum):
    """Rule by which rotary frequencies are scaled for contexts longer than those of the first training."""

    LINEAR = "linear"  # every frequency divided by the factor
    LLAMA3 = "llama3"  # low frequencies divided, high ones kept, a ramp between (Llama 3.1)
    YARN = "yarn"  # as llama3, with a ramp over the frequencies' numbers, and larger scores (Peng et al. 2023)
    LONGROPE = "longrope"  # a divisor for each frequency, one list for the original context and one beyond (Phi-3)
    DYNAMIC = "dynamic"  # a base that grows with the served context (NTK)
    PROPORTIONAL = "proportional"  # every frequency divided by the factor, the lowest frequencies set to 0 (Gemma 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies. Raises ValueError for a field that is missing, invalid or not used by `kind`.

    attention_factor: in kinds yarn and longrope, factor of cosines and sines; None: computed by `rotation_factor`.
    beta_fast, beta_slow: in kind yarn, a frequency with more turns than beta_fast in the original context is kept, and
        one with fewer than beta_slow is divided.
    short_divisors, long_divisors: in kind longrope, divisor of each frequency: for contexts up to
        `original_context_length`, and for longer contexts.
    rotated_fraction: in kind proportional, share of the frequencies that are used: the highest; the others are 0.
    """

    kind: RopeScalingKind
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_context_length: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    short_divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None
    rotated_fraction: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", check_member("rope_scaling kind", self.kind, RopeScalingKind))
        check_number("rope_scaling factor", self.factor)
        numbers, lists, optional = _FIELDS_OF_SCALING[self.kind]
        for name in numbers:
            check_number(f"rope_scaling {name}", getattr(self, name))
        for name in lists:
            object.__setattr__(self, name, _checked_numbers(f"rope_scaling {name}", getattr(self, name)))
        for field in dataclasses.fields(self)[2:]:
            if getattr(self, field.name) is not None and field.name not in numbers + lists + optional:
                known = ", ".join(("factor", *numbers, *lists, *optional))
                raise ValueError(
                    f"rope_scaling of kind {self.kind} has no parameter except {known}; remove {field.name}"
                )
        if self.attention_factor is not None:
            check_number("rope_scaling attention_factor", self.attention_factor)
        if self.rotated_fraction is not None and self.rotated_fraction > 1:
            raise ValueError(f"rope_scaling rotated_fraction must be at most 1, not {self.rotated_fraction}")
        for lower, higher in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low, high = getattr(self, lower), getattr(self, higher)
            if low is not None and high is not None and low >= high:
                raise ValueError(f"in rope_scaling {lower} must be less than {higher}")

    def divisors(self, max_context_length: int) -> tuple[float, ...] | None:
        """Return LongRoPE's divisor of each frequency (arXiv 2402.13753); None for other kinds of scaling.

        max_context_length: longest context that the model serves. It selects the short or the long divisors for all
        sequences, because the rotated keys of a growing sequence are cached.
        """
        is_long = self.original_context_length is not None and max_context_length > self.original_context_length
        return self.long_divisors if is_long else self.short_divisors

    @property
    def dynamic_original(self) -> int | None:
        """Return the original context length of kind dynamic; None for other kinds."""
        return self.original_context_length if self.kind is RopeScalingKind.DYNAMIC else None

    @property
    def rotation_factor(self) -> float:
        """Return the factor of cosines and sines: `attention_factor` if given, else LongRoPE's or YaRN's, else 1.

        With `factor` up to 1 the computed factor is 1.
        LongRoPE: arXiv 2402.13753, section 3.3. YaRN: arXiv 2309.00071, equation 22.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1.0:
            return 1.0
        if self.kind is RopeScalingKind.YARN:
            return 0.1 * math.log(self.factor) + 1.0
        if self.kind is not RopeScalingKind.LONGROPE or self.original_context_length is None:
            return 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_context_length))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a `RopeScaling` from a dictionary. Raises ValueError for unknown or missing keys, and invalid values."""
        check_keys(cls, values, "rope_scaling")
        return cls(**values)


# Numbers, lists of numbers and optional numbers that each kind of scaling has besides `factor`.
_FIELDS_OF_SCALING: Mapping[RopeScalingKind, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    RopeScalingKind.LINEAR: ((), (), ()),
    RopeScalingKind.DYNAMIC: (("original_context_length",), (), ()),
    RopeScalingKind.LLAMA3: (("low_freq_factor", "high_freq_factor", "original_context_length"), (), ()),
    RopeScalingKind.YARN: (("original_context_length", "beta_fast", "beta_slow"), (), ("attention_factor",)),
    RopeScalingKind.LONGROPE: (
        ("original_context_length",),
        ("short_divisors", "long_divisors"),
        ("attention_factor",),
    ),
    RopeScalingKind.PROPORTIONAL: (("rotated_fraction",), (), ()),
}


# Experts of all layers. A limit is needed because every expert's tensors are listed before any is read.
MAX_EXPERTS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): gated MLPs, of which each token uses a few.

    Raises ValueError for an invalid field.

    num: experts of a layer. A linear layer, the router, and a softmax give each a probability.
    num_per_token: experts that compute a token: the most probable ones. Their weighted outputs are added.
    mlp_size: feed-forward size of an expert.
    normalizes: the weights are the probabilities divided by their sum, in place of the probabilities themselves.
    dense_layers: layers with a single MLP of `ModelConfig.mlp_size`, without experts.
    """

    num: int
    num_per_token: int
    mlp_size: int
    normalizes: bool
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_size("experts num", self.num, MAX_EXPERTS)
        check_size("experts num_per_token", self.num_per_token, self.num)
        check_size("experts mlp_size", self.mlp_size)
        if not isinstance(self.normalizes, bool):
            raise ValueError(f"experts normalizes must be true or false, not {self.normalizes!r}")
        object.__setattr__(self, "dense_layers", checked_layers("experts dense_layers", self.dense_layers))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make `Experts` from a dictionary. Raises ValueError for unknown or missing keys, and invalid values."""
        check_keys(cls, values, "experts")
        return cls(**values)


def checked_layers(name: str, layers: object) -> tuple[int, ...]:
    """Return a list of layer numbers as a tuple. Raises ValueError unless all are integers; any integer is accepted."""
    if not isinstance(layers, (list, tuple)) or any(type(layer) is not int for layer in layers):
        raise ValueError(f"{name} must be a list of layer numbers, not {layers!r}")
    return tuple(layers)


def _checked_numbers(name: str, values: object) -> tuple[float, ...]:
    """Return a list of positive numbers as a tuple of floats. Raises ValueError for anything else."""
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"{name} must be a list of positive numbers, not {values!r:.80}")
    for value in values:
        check_number(name, value)
    return tuple(map(float, values))


def check_keys(kind: type, values: Mapping[str, Any], name: str) -> None:
    """Raise ValueError if a key of `values` is not a field of the dataclass, or if a required field is missing."""
    fields = dataclasses.fields(kind)
    if unknown := sorted(set(values) - {field.name for field in fields}):
        raise ValueError(f"unknown {name} keys: {', '.join(unknown)}; remove them")
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if missing := sorted(required - set(values)):
        raise ValueError(f"missing {name} keys: {', '.join(missing)}; add them")


def check_member(name: str, value: object, kind: type[StrEnum]) -> StrEnum:
    """Return the enum member that a config field's value names. Raises ValueError if there is no such member."""
    if value not in list(kind):
        raise ValueError(f"{name} must be one of {', '.join(kind)}, not {value!r}")
    return kind(str(value))


# Larger than any model's sizes: fits 32 bits, so tensors' indices and the product of two sizes fit 64 bits.
MAX_SIZE = 2**31 - 1


def check_size(name: str, value: object, largest: int = MAX_SIZE) -> None:
    """Raise ValueError unless the value of a field is a positive integer up to `largest`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if value > largest:
        raise ValueError(f"{name} must be at most {largest:,}, not a number of {len(str(value))} digits")


def check_number(name: str, value: object) -> None:
    """Raise ValueError unless the value of a field is a positive number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a positive number, not {value!r}")
