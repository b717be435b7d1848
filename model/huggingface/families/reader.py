"""Strict reader of config.json. Every key is used, known to be harmless, or rejected by name with a remedy."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from model.config import MAX_LAYERS
from model.config_enums import check_number, check_size
from model.io.checkpoint_files import CheckpointError

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
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens reorder_and_upcast_attn
"""
HARMLESS = frozenset(_HARMLESS_KEYS.split())
_NOT_COMPUTED = "not implemented; use a checkpoint without it"
# Allowed values and remedy of keys that a family may leave unread. null is always allowed.
MUST_BE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "is_encoder_decoder": ((False,), "only decoder-only models are served"),
    "add_cross_attention": ((False,), "only decoder-only models are served"),
    "cross_attention_hidden_size": ((), "only decoder-only models are served"),
    "use_bidirectional_attention": ((False,), "only causal models are served"),
    "quantization_config": ((), "quantized weights are not supported; use the checkpoint before its quantization"),
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
    "use_mrope": ((False,), _NOT_COMPUTED),
    "pruned_heads": (({},), _NOT_COMPUTED),
    "per_layer_config": (({},), _NOT_COMPUTED),
    "chunk_size_feed_forward": ((0,), _NOT_COMPUTED),
}


class ConfigReader:
    """Reader of one config.json. Each key is read once; `finish` checks that all unread keys are harmless."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._left = dict(values)
        self._asked: set[str] = set()

    def take(self, name: str) -> Any:
        """Return the value of a key and count the key as read; None if it is absent or null."""
        self._asked.add(name)
        return self._left.pop(name, None)

    def size(self, name: str, default: int) -> int:
        """Read a positive integer. Raise CheckpointError for another value."""
        value = self._left.pop(name, default)
        self._check(check_size, name, value)
        return int(value)

    def layers(self, name: str, default: int) -> int:
        """Read a number of layers. Raise CheckpointError for another value, or for more than MAX_LAYERS.

        The limit is checked here because families make lists of all layers before ModelConfig checks the number.
        """
        count = self.size(name, default)
        if count > MAX_LAYERS:
            self.refuse(name, count, f"at most {MAX_LAYERS:,} layers are supported; correct the config")
        return count

    def optional_size(self, name: str, default: int | None) -> int | None:
        """Read a positive integer or null. Raise CheckpointError for another value."""
        self._asked.add(name)
        value = self._left.pop(name, default)
        if value is not None:
            self._check(check_size, name, value)
        return None if value is None else int(value)

    def number(self, name: str, default: float) -> float:
        """Read a positive number. Raise CheckpointError for another value."""
        value = self._left.pop(name, default)
        self._check(check_number, name, value)
        return float(value)

    def echo(self, name: str, value: float, source: str) -> None:
        """Check a key that the family ignores: raise CheckpointError if it is present with another value.

        Args:
            value: the value that the model uses.
            source: the key that sets this value.
        """
        if self._left.get(name) is not None and (said := self.number(name, value)) != value:
            self.refuse(name, said, f"this family ignores this key and uses {value}; set {source} instead")

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false. Raise CheckpointError for another value."""
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "expected true or false; correct the config")
        return value

    def choice(self, name: str, default: str, choices: Mapping[str, T]) -> T:
        """Return the item of `choices` that the value names. Raise CheckpointError for an unknown name."""
        value = self._left.pop(name, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(name, value, f"supported are {', '.join(choices)}; use a checkpoint with one of these")
        return choices[value]

    def refuse(self, name: str, value: object, remedy: str) -> NoReturn:
        """Raise CheckpointError: one line with the file, the key, its value and the remedy."""
        shown = name if name.isprintable() and len(name) < 80 else _short(name)
        raise CheckpointError(f"{self.path}: {shown}={_short(value)}: {remedy}")

    def finish(self) -> None:
        """Check every key that was not read.

        Raises:
            CheckpointError: a key is unknown, or its value requires a feature that is not implemented.
        """
        for name, value in self._left.items():
            if value is None or name in HARMLESS:
                continue
            if name == "layer_types" and self._has_no_window and _are_full(value):
                continue
            if name not in MUST_BE:
                self.refuse(name, value, "unknown key; remove it if the model computes the same without it")
            allowed, remedy = MUST_BE[name]
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
                self.refuse(name, value, remedy)

    @property
    def _has_no_window(self) -> bool:
        """True if the family did not read `sliding_window`. A family that reads it must read `layer_types` too."""
        return "sliding_window" not in self._asked

    def _check(self, check: Any, name: str, value: object) -> None:
        try:
            check(name, value)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {_short(str(error), quoted=False)}") from error


def _are_full(types: object) -> bool:
    return isinstance(types, list) and all(kind == "full_attention" for kind in types)


def _short(value: object, *, quoted: bool = True) -> str:
    """Return a value's text for an error message, shortened to at most 200 characters."""
    return (_REPR.repr(value) if quoted else str(value))[:200]


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = 8
