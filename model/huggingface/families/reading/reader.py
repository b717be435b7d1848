"""Reader of a Hugging Face config.json: every key is used, harmless, without a value, or rejected by name."""

import math
import reprlib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from model.config import MAX_LAYERS
from model.config_enums import RopeScaling, RopeScalingKind, check_number, check_size
from model.io.files import CheckpointError

T = TypeVar("T")

# Keys that do not change the logits: training, bookkeeping, heads of other tasks, token ids and sampling defaults.
# Token ids and sampling defaults are read from generation_config.json and the tokenizer files.
# `reorder_and_upcast_attn` selects how a matrix product is computed; its mathematical result is the same.
_HARMLESS_KEYS = """
    _name_or_path name_or_path _commit_hash transformers_version _attn_implementation model_type
    _attn_implementation_autoset attn_implementation use_cache initializer_range dtype torch_dtype return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id unk_token_id attention_dropout hidden_dropout classifier_dropout
    resid_pdrop embd_pdrop attn_pdrop summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout task_specific_params finetuning_task problem_type num_labels id2label label2id is_decoder
    pretraining_tp tokenizer_class prefix gradient_checkpointing unsloth_version unsloth_fixed model_max_length
    tie_last_hidden_states transformers.js_config max_length min_length do_sample early_stopping num_beams
    num_beam_groups temperature diversity_penalty top_k top_p typical_p repetition_penalty length_penalty
    cache_implementation _sliding_window_pattern
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens reorder_and_upcast_attn
    max_new_tokens cache_implementation max_sequence_length is_llama_config _num_labels _flash_attn_2_enabled
    dropout activation_dropout layerdrop init_std output_router_logits router_aux_loss_coef router_jitter_noise
    internal_version
"""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = 8
HARMLESS = frozenset(_HARMLESS_KEYS.split())
_NOT_COMPUTED = "not implemented; use a checkpoint without it"
Requirements = Mapping[str, tuple[tuple[object, ...], str]]
# Allowed values and remedy of keys that a family may leave unread. null is always allowed.
MUST_BE: Requirements = {
    "is_encoder_decoder": ((False,), "only decoder-only models are served"),
    "add_cross_attention": ((False,), "only decoder-only models are served"),
    "cross_attention_hidden_size": ((), "only decoder-only models are served"),
    "use_bidirectional_attention": ((False,), "only causal models are served; use another model"),
    "auto_map": ((), "code in a checkpoint is never run; remove the key if model_type alone describes the model"),
    "attention_bias": ((False,), _NOT_COMPUTED),
    "mlp_bias": ((False,), _NOT_COMPUTED),
    "sliding_window": ((), _NOT_COMPUTED),
    "use_sliding_window": ((False,), _NOT_COMPUTED),
    "scale_attn_by_inverse_layer_idx": ((False,), _NOT_COMPUTED),
    "attn_logit_softcapping": ((), _NOT_COMPUTED),
    "final_logit_softcapping": ((), _NOT_COMPUTED),
    "partial_rotary_factor": ((1.0,), _NOT_COMPUTED),
    "clip_qkv": ((), _NOT_COMPUTED),
    "rope_interleaved": ((False,), _NOT_COMPUTED),
    "lm_head_bias": ((False,), _NOT_COMPUTED),
    # Keys of Phi-3-small, another architecture. The first files of Phi-4-mini have them too.
    "full_attn_mod": ((1,), _NOT_COMPUTED),
    "interpolate_factor": ((1,), _NOT_COMPUTED),
    "use_mrope": ((False,), _NOT_COMPUTED),
    "pruned_heads": (({},), _NOT_COMPUTED),
    "per_layer_config": (({},), _NOT_COMPUTED),
    "chunk_size_feed_forward": ((0,), _NOT_COMPUTED),
}
_UNKNOWN = ((), "unknown key; remove it if the model computes the same without it")
DEFAULT_THETA = 10_000.0
_ORIGINAL = "original_max_position_embeddings"
_TYPES = ("default", *RopeScalingKind)


class ConfigReader:
    """Reader of one config.json, or of an object in it. A key whose value has an unexpected type raises ValueError.

    A key is removed when it is read, so it can be read once. A `default` applies to an absent key only, not to null.

    Args:
        prefix: path of the object, for messages.
        harmless: keys that a family may leave unread, with any value.
        must_be: keys that a family may leave unread if they are null or have one of the listed values.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        *,
        prefix: str = "",
        harmless: Set[str] = HARMLESS,
        must_be: Requirements = MUST_BE,
    ) -> None:
        self.path = path
        self._prefix, self._harmless, self._must_be = prefix, harmless, must_be
        self._unread = dict(values)
        self._read_keys: set[str] = set()
        self._noted: dict[str, list[str]] = {}  # keys with their values, by remedy
        self.warnings: list[str] = []

    def value(self, name: str) -> Any:
        """Return the value of a config key, unchecked; None if the key is absent or null."""
        self._read_keys.add(name)
        return self._unread.pop(name, None)

    def has_any(self, *names: str) -> bool:
        """Return True if any of these config keys is unread, with a value other than null, false, 0 and empty."""
        return any(self._unread.get(name) for name in names)

    def optional_count(self, name: str, default: int | None) -> int | None:
        """Return the value of a config key that must be a positive integer, 0 or null; None for 0 and null."""
        return None if self._unread.get(name, default) == 0 else self.optional_size(name, default)

    def size(self, name: str, default: int) -> int:
        """Return the value of a config key that must be a positive integer; null is rejected."""
        value = self._unread.pop(name, default)
        check_size(name, value)
        return int(value)

    def size_of(self, names: tuple[str, ...], default: int) -> int:
        """Return the size that any of several config keys sets, else `default`.

        Raises CheckpointError if two differ.
        """
        found = [(name, self.size(name, default)) for name in names if name in self._unread]
        for name, size in found[1:]:
            if size != found[0][1]:
                self.reject(name, size, f"contradicts {found[0][0]}={found[0][1]}; remove the wrong key")
        return found[0][1] if found else default

    def num_layers(self, name: str, default: int) -> int:
        """Return the value of a config key that must be a number of layers, at most MAX_LAYERS."""
        count = self.size(name, default)
        if count > MAX_LAYERS:
            self.reject(name, count, f"at most {MAX_LAYERS:,} layers are supported; correct the config")
        return count

    def optional_size(self, name: str, default: int | None) -> int | None:
        """Return the value of a config key that must be a positive integer or null; None for null."""
        self._read_keys.add(name)
        value = self._unread.pop(name, default)
        if value is not None:
            check_size(name, value)
        return None if value is None else int(value)

    def number(self, name: str, default: float) -> float:
        """Return the value of a config key that must be a positive number; null is rejected."""
        value = self._unread.pop(name, default)
        check_number(name, value)
        return float(value)

    def optional_number(self, name: str, default: float | None) -> float | None:
        """Return the value of a config key that must be a positive number or null; None for null."""
        value = self._unread.pop(name, default)
        if value is not None:
            check_number(name, value)
        return None if value is None else float(value)

    def check_ignored(self, name: str, value: float, source: str) -> None:
        """Reject the config key `name`, which the family ignores, unless it is absent, null or equal to `value`.

        value: the value that the family uses instead. source: the key that sets this value.
        """
        if self._unread.get(name) is not None and (found := self.number(name, value)) != value:
            self.reject(name, found, f"this family ignores this key and uses {value}; set {source} instead")

    def check_all(self, values: Mapping[str, object], remedy: str) -> None:
        """Read config keys that must have the value in `values`, be null or be absent. Reject any other value."""
        for name, wanted in values.items():
            if (found := self.value(name)) is not None and found != wanted:
                self.reject(name, found, remedy)

    def flag(self, name: str, default: bool) -> bool:
        """Return the value of a config key that must be true or false."""
        value = self._unread.pop(name, default)
        if not isinstance(value, bool):
            self.reject(name, value, "expected true or false; correct the config")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, T]) -> T:
        """Return the item of `choices` that a config key's value names, `default` if absent; reject any other name."""
        value = self._unread.pop(name, default)
        if not isinstance(value, str) or value not in choices:
            self.reject(name, value, f"supported are {', '.join(choices)}; use a checkpoint with one of these")
        return choices[value]

    def check_off(self, name: str, remedy: str) -> None:
        """Read a config key that must be false. If it is true, `note` it, for `check_unread` to reject."""
        if self.flag(name, False):
            self.note(name, True, remedy)

    def note(self, name: str, value: object, remedy: str) -> None:
        """Record a config key to reject. Reading goes on, and `check_unread` rejects all such keys in one error."""
        self._noted.setdefault(remedy, []).append(f"{self._shown(name)}={_short(value)}")

    def reject(self, name: str, value: object, remedy: str) -> NoReturn:
        """Raise CheckpointError with the name and value of a config key, the remedy, and all keys noted so far."""
        self.note(name, value, remedy)
        self._reject_noted()

    def _reject_noted(self) -> NoReturn:
        problems = (f"{', '.join(keys)}: {remedy}" for remedy, keys in self._noted.items())
        raise CheckpointError(f"{self.path}: {'; '.join(problems)}")

    def _shown(self, name: str) -> str:
        return self._prefix + (name if name.isprintable() and len(name) < 80 else _short(name))

    def warn(self, name: str, value: object, consequence: str) -> None:
        """Add a warning about a config key, with its value and the consequence, to `warnings`."""
        self.warnings.append(f"{self.path}: {self._shown(name)}={_short(value)}: {consequence}")

    def check_unread(self) -> None:
        """Reject, in one error, the noted keys and all unread keys that are unknown or need an unimplemented feature.

        An unknown key without a value (null, false, 0 or empty) gives a warning: a feature that is off.
        """
        for name, value in self._unread.items():
            if name in self._harmless or (value is None and name in self._must_be):
                continue
            # A family that reads `sliding_window` must read `layer_types` too.
            is_full = isinstance(value, list) and all(kind == "full_attention" for kind in value)
            if name == "layer_types" and "sliding_window" not in self._read_keys and is_full:
                continue
            if name not in self._must_be and not value:
                self.warn(name, value, "unknown key, ignored")
                continue
            allowed, remedy = self._must_be.get(name, _UNKNOWN)
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
                self.note(name, value, remedy)
        if self._noted:
            self._reject_noted()


def _short(value: object) -> str:
    return _REPR.repr(value)[:200]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding: base and scaling of the frequencies, and the fraction of each head that is rotated."""

    theta: float
    scaling: RopeScaling | None
    partial: float

    def dim(self, head_dim: int) -> int | None:
        """Return the number of rotated dimensions of a head; None for all."""
        size = int(head_dim * self.partial)
        return None if size == head_dim else size


def read_rope(
    reader: ConfigReader,
    *,
    max_positions: int,
    theta_names: tuple[str, ...] = ("rope_theta",),
    partial_names: tuple[str, ...] = (),
    partial: float = 1.0,
    theta: float = DEFAULT_THETA,
    original: int | None = None,
    longrope_names: tuple[str, ...] = (),
) -> Rope:
    """Read all config.json keys of the rotary embedding. Several keys that set the same value must agree.

    Args:
        max_positions: the model's context length; also the length before scaling, if no key sets that length.
        theta_names, partial_names: the family's top-level keys for `Rope.theta` and `Rope.partial`.
        partial, theta: defaults of `Rope.partial` and `Rope.theta`.
        original: default of the family's top-level key for LongRoPE's original context length; None: no such key.
        longrope_names: the family's other names of LongRoPE.
    """
    top = None if original is None else reader.size(_ORIGINAL, original)
    name, values = _scaling_values(reader)
    kind = _kind(reader, name, values, longrope_names)
    base = _agreed(reader, (f"{name}.rope_theta", values.pop("rope_theta", None)), theta_names, theta)
    inner = (f"{name}.partial_rotary_factor", values.pop("partial_rotary_factor", None))
    fraction = _agreed(reader, inner, partial_names, partial)
    is_proportional = kind == RopeScalingKind.PROPORTIONAL
    if not partial_names and fraction != 1.0 and not is_proportional:
        reader.reject(inner[0], fraction, "this family rotates whole heads; use a checkpoint without it")
    if fraction > 1.0:
        reader.reject(inner[0], fraction, "at most 1.0 is possible; correct the config")
    length = values.pop(_ORIGINAL, max_positions if top is None else top)
    if top is not None and length != top:
        reader.reject(f"{name}.{_ORIGINAL}", length, f"contradicts {_ORIGINAL}={top}; remove the wrong key")
    if kind == "default":
        scaling = None
    else:
        check_number(f"{name}.{_ORIGINAL}", length)
        extension = max_positions / length if kind in (RopeScalingKind.YARN, RopeScalingKind.LONGROPE) else None
        fields = {"kind": kind, "factor": values.pop("factor", extension)}
        if kind in (RopeScalingKind.LLAMA3, RopeScalingKind.YARN, RopeScalingKind.LONGROPE):
            fields["original_context_length"] = length
        if kind == RopeScalingKind.DYNAMIC:
            if length not in (max_positions, top):
                reader.reject(f"{name}.{_ORIGINAL}", length, f"must be {max_positions}, the context; remove the key")
            fields["original_context_length"] = max_positions
        elif kind == RopeScalingKind.LLAMA3:
            fields |= {key: values.pop(key, None) for key in ("low_freq_factor", "high_freq_factor")}
        elif kind == RopeScalingKind.YARN:
            fields |= _yarn_fields(reader, name, values, fields["factor"])
        elif kind == RopeScalingKind.LONGROPE:
            fields |= {f"{key}_divisors": values.pop(f"{key}_factor", None) for key in ("short", "long")}
            fields["attention_factor"] = values.pop("attention_factor", None)
        elif is_proportional:
            fields |= {"factor": 1.0 if fields["factor"] is None else fields["factor"], "rotated_fraction": fraction}
        scaling = RopeScaling.from_dict(fields)
    if values:
        key = sorted(values)[0]
        reader.reject(f"{name}.{key}", values[key], f"not a key of rope type {kind}; use a checkpoint without it")
    return Rope(theta=base, scaling=scaling, partial=1.0 if is_proportional else fraction)


def _yarn_fields(reader: ConfigReader, name: str, values: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return the fields that YaRN alone has, and remove their keys from `values`.

    Without an `attention_factor`, `mscale` and `mscale_all_dim` together set the field, as in DeepSeek's models.
    """
    if not values.pop("truncate", True):
        reader.reject(
            f"{name}.truncate", False, "a ramp that is not rounded is not implemented; use another checkpoint"
        )
    scales = {key: values.pop(key, 0) for key in ("mscale", "mscale_all_dim")}
    attention_factor = values.pop("attention_factor", None)
    if attention_factor is None and all(scales.values()):
        for key, scale in (*scales.items(), ("factor", factor)):
            check_number(f"{name}.{key}", scale)
        upper, lower = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales.values())
        attention_factor = upper / lower
    betas = {key: values.pop(key, None) or default for key, default in (("beta_fast", 32), ("beta_slow", 1))}
    return {"attention_factor": attention_factor, **betas}


def _scaling_values(reader: ConfigReader) -> tuple[str, dict[str, Any]]:
    """Return the name of the key with the rope dictionary, and the dictionary's items that are not null.

    The key is rope_scaling or rope_parameters; if both are set, they must be equal. Without both there are no items.
    """
    found = [(name, reader.value(name)) for name in ("rope_scaling", "rope_parameters")]
    for name, value in found:
        if not isinstance(value, Mapping | None):
            reader.reject(name, value, "expected a JSON object or null; correct the config")
    filled = [(name, value) for name, value in found if value]
    if len(filled) == 2 and filled[0][1] != filled[1][1]:
        reader.reject("rope_scaling", filled[0][1], "contradicts rope_parameters; remove the wrong key")
    name, value = filled[0] if filled else ("rope_parameters", {})
    return name, {key: entry for key, entry in value.items() if entry is not None}


def _kind(reader: ConfigReader, name: str, values: dict[str, Any], longrope_names: tuple[str, ...]) -> str:
    kinds = {str(values.pop(key)) for key in ("rope_type", "type") if key in values} or {"default"}
    kinds = {RopeScalingKind.LONGROPE.value if kind in longrope_names else kind for kind in kinds}
    if len(kinds) > 1 or not kinds <= set(_TYPES):
        kind = " and ".join(sorted(kinds))
        reader.reject(
            f"{name}.rope_type", kind, f"supported are {', '.join(_TYPES)}; use a checkpoint with one of these"
        )
    return kinds.pop()


def _agreed(reader: ConfigReader, inner: tuple[str, Any], names: tuple[str, ...], default: float) -> float:
    """Return the number that a key of the rope dictionary or top-level keys set, else `default`.

    Raises CheckpointError if two keys set different numbers. inner: name and value of the dictionary's key.
    """
    values = [(name, value) for name, value in (inner, *((n, reader.value(n)) for n in names)) if value is not None]
    for name, value in values:
        check_number(name, value)
        if value != values[0][1]:
            reader.reject(name, value, f"contradicts {values[0][0]}={values[0][1]}; remove the wrong key")
    return float(values[0][1]) if values else default
