"""Frozen, torch-free descriptions of a model and of how to sample from it.

Everything here is a plain value: the API process, which never imports torch, reads these as freely as the
engine does. A value that cannot work is refused when it is made, with a `ValueError` that names the field.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class PositionKind(StrEnum):
    """How a token learns where it stands."""

    LEARNED = "learned"  # one trained vector a position, added to the embedding (GPT-2)
    ROTARY = "rotary"  # queries and keys rotated by an angle that grows with the position (RoFormer)


class NormKind(StrEnum):
    """What precedes attention and MLP."""

    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"


class MlpKind(StrEnum):
    """The feed-forward half of a block."""

    GELU = "gelu"  # down(gelu(up(x)))
    SWIGLU = "swiglu"  # down(silu(gate(x)) * up(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, completely described.

    The head counts decide the attention: `num_kv_heads == num_heads` is multi-head, `1` is multi-query,
    anything between is grouped-query attention.

    Raises:
        ValueError: a size is not positive, the head counts do not divide, or a rotary head has odd size.
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

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "max_context_length", "num_layers", "hidden_size", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "mlp_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        for name in ("attention_bias", "mlp_bias", "qk_norm", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} must be a positive number, not {value!r}")
        for name, kind in (("position", PositionKind), ("norm", NormKind), ("mlp", MlpKind)):
            value = getattr(self, name)
            if value not in list(kind):
                raise ValueError(f"{name} must be one of {', '.join(kind)}, not {value!r}")
            object.__setattr__(self, name, kind(value))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.position is PositionKind.ROTARY and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")

    @property
    def query_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Trainable numbers; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV-cache one token of context occupies: keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint of this model, in module order.

        Torch-free twin of `Transformer(config).state_dict()`; a test holds the two together. It lets a
        checkpoint be checked against its config before any tensor is read.
        """
        embed, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (self.vocab_size, embed)}
        if self.position is PositionKind.LEARNED:
            shapes["position_embedding.weight"] = (self.max_context_length, embed)
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            shapes |= self._norm_shapes(prefix + "attention_norm", embed)
            shapes |= _linear_shapes(prefix + "attention.qkv", embed, query + 2 * key, self.attention_bias)
            shapes |= _linear_shapes(prefix + "attention.out", query, embed, self.attention_bias)
            if self.qk_norm:
                shapes[prefix + "attention.query_norm.weight"] = (self.head_dim,)
                shapes[prefix + "attention.key_norm.weight"] = (self.head_dim,)
            shapes |= self._norm_shapes(prefix + "mlp_norm", embed)
            widened = 2 * self.mlp_size if self.mlp is MlpKind.SWIGLU else self.mlp_size
            name = "gate_up" if self.mlp is MlpKind.SWIGLU else "up"
            shapes |= _linear_shapes(f"{prefix}mlp.{name}", embed, widened, self.mlp_bias)
            shapes |= _linear_shapes(prefix + "mlp.down", self.mlp_size, embed, self.mlp_bias)
        shapes |= self._norm_shapes("final_norm", embed)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, embed)
        return shapes

    def _norm_shapes(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
        if self.norm is NormKind.LAYER_NORM:
            shapes[f"{name}.bias"] = (size,)
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` gives back an equal config."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a config, refusing unknown keys and naming missing ones.

        Raises:
            ValueError: a key is unknown, missing, or has an unusable value.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"unknown model config keys: {', '.join(unknown)}")
        if missing := sorted(names - set(values)):
            raise ValueError(f"missing model config keys: {', '.join(missing)}")
        return cls(**values)


def _linear_shapes(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (outputs, inputs)}
    if bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one completion is drawn and when it ends.

    `temperature == 0`, or nearly, is greedy. `top_k == 0`, `top_p == 1` and `min_p == 0` switch those filters off.
    `seed` fixes every draw: draw number i of a sequence depends on (seed, position) alone, see `sampling`.
    `logprobs` is None for none, else how many alternatives to report beside the sampled token.
    `prompt_logprobs` likewise for the prompt's tokens, the first of which has none.
    `max_tokens == 0` computes the prompt (for `prompt_logprobs`) and generates nothing.
    `min_tokens` forbids ending by end-of-text, stop token or stop string before that many tokens.

    Raises:
        ValueError: a value is out of range; the message names the field and the range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, not {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be over 0 and at most 1, not {self.top_p!r}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p!r}")
        for name in ("max_tokens", "min_tokens", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, not {self.seed!r}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} allowed"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MAX_LOGPROBS}, not {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether every draw takes the most likely token.

        Below 1e-5 a temperature would overflow float32, and means the same.
        """
        return self.temperature < 1e-5


MAX_LOGPROBS = 20
# Each is forbidden one by one in every draw before min_tokens: thousands would slow the steps of everybody.
MAX_STOP_TOKEN_IDS = 128
