"""Default sampling parameters of a Hugging Face checkpoint: its generation_config.json. Torch-free.

Key names and their neutral values are those of `transformers.GenerationConfig`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from model.io.files import CheckpointError, read_json
from model.sampling.params import REPETITION_RANGE

GENERATION_CONFIG_FILE = "generation_config.json"
_LONGEST_SHOWN = 60
_LARGEST = 2**31 - 1  # the largest count, as in requests


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """Default sampling parameters of a checkpoint; None means that the file has no such default.

    temperature: 0 if the file has `do_sample: false`.
    top_k: 0 keeps all tokens.
    eos_token_ids: each of these ends a text.
    ignored: keys of the file that would change a completion but are not supported.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    ignored: tuple[str, ...] = ()


def read_generation_config(directory: Path) -> GenerationConfig:
    """Read generation_config.json; all values are None if there is no such file.

    Raises:
        CheckpointError: the file is not a JSON object, or a value is out of its range.
    """
    path = directory / GENERATION_CONFIG_FILE
    values = {key: value for key, value in read_json(path, optional=True).items() if value is not None}
    used: dict[str, Any] = {}
    for key, (kind, expected) in _KINDS.items():
        if key in values:
            try:
                used[key] = msgspec.convert(values[key], kind)
            except (msgspec.ValidationError, OverflowError) as error:
                shown = _shown(values[key])
                raise CheckpointError(f"{path}: {key} must be {expected}, not {shown}; correct the file") from error
    try:
        used["eos_token_ids"] = token_ids(values.get("eos_token_id"))
    except ValueError as error:
        raise CheckpointError(f"{path}: eos_token_id: {error}; correct the file") from error
    if used.pop("do_sample", True) is False:
        used["temperature"] = 0.0
    ignored = sorted(key for key, value in values.items() if not _acts_or_is_harmless(key, value))
    return GenerationConfig(**used, ignored=tuple(ignored))


def token_ids(value: object) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id`, which Hugging Face writes as null, one id or a list.

    Raises:
        ValueError: it is something else.
    """
    try:
        ids = msgspec.convert([] if value is None else value, _TokenId | list[_TokenId])
    except msgspec.ValidationError:
        raise ValueError(f"a token id or a list of token ids expected, not {_shown(value)}") from None
    return tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))


def _acts_or_is_harmless(key: str, value: object) -> bool:
    if key in _KINDS or key == "eos_token_id" or key in _HARMLESS or key.startswith(("_", "output_", "assistant_")):
        return True
    return key in _NEUTRAL and value == _NEUTRAL[key]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


_TokenId = Annotated[int, Meta(ge=0)]
# Supported keys: the type of a value, and the expected value for the error.
_KINDS: Mapping[str, tuple[Any, str]] = {
    "do_sample": (bool, "true or false"),
    "temperature": (Annotated[float, Meta(ge=0, le=sys.float_info.max)], "a number of at least 0"),
    "top_k": (Annotated[int, Meta(ge=0, le=_LARGEST)], "a whole number from 0 to 2147483647"),
    "top_p": (Annotated[float, Meta(gt=0, le=1)], "a number over 0 and at most 1"),
    "min_p": (Annotated[float, Meta(ge=0, le=1)], "a number from 0 to 1"),
    "repetition_penalty": (
        Annotated[float, Meta(ge=REPETITION_RANGE[0], le=REPETITION_RANGE[1])],
        "a number from {:g} to {:g}".format(*REPETITION_RANGE),
    ),
    "max_new_tokens": (Annotated[int, Meta(ge=1, le=_LARGEST)], "a whole number from 1 to 2147483647"),
    "bos_token_id": (_TokenId, "a token id"),
    "pad_token_id": (_TokenId, "a token id"),
}
# Keys that change no completion: records, caches, speed, shape of Python results.
_HARMLESS = {
    "transformers_version",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "return_dict_in_generate",
    "return_legacy_cache",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "compile_config",
    "disable_compile",
    "low_memory",
    "prefill_chunk_size",
}
# Keys that would change a completion, with the values at which they do not.
_NEUTRAL: Mapping[str, object] = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "diversity_penalty": 0.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "early_stopping": False,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_length": 20,  # transformers writes this default into every file of older versions
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
}
