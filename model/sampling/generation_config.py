"""Default sampling parameters of a Hugging Face checkpoint: its generation_config.json. Torch-free.

Key names and their neutral values are those of `transformers.GenerationConfig`.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.io.json_file import FileError, read_object
from model.sampling.params import REPETITION_RANGE

GENERATION_CONFIG_FILE = "generation_config.json"
_LONGEST_SHOWN = 60
_LARGEST = 2**31 - 1  # the largest count, as in requests


class GenerationConfigError(ValueError):
    """Error of an unusable generation_config.json. One line: the file, the key, the remedy."""


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
        GenerationConfigError: the file is not a JSON object, or a value is out of its range.
    """
    path = directory / GENERATION_CONFIG_FILE
    try:
        values = read_object(path, optional=True)
    except FileError as error:
        raise GenerationConfigError(f"{path}: {error}") from error
    return _config(path, {key: value for key, value in values.items() if value is not None})


def token_ids(value: object) -> tuple[int, ...]:
    """Return the ids of an `eos_token_id`, which Hugging Face writes as null, one id or a list.

    Raises:
        ValueError: it is something else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_id, ids)):
        raise ValueError(f"a token id or a list of token ids expected, not {_shown(value)}")
    return tuple(dict.fromkeys(ids))


def _config(path: Path, values: Mapping[str, Any]) -> GenerationConfig:
    for key, (is_good, expected) in _RANGES.items():
        if key in values and not is_good(values[key]):
            raise GenerationConfigError(
                f"{path}: {key} must be {expected}, not {_shown(values[key])}; correct the file"
            )
    try:
        eos_token_ids = token_ids(values.get("eos_token_id"))
    except ValueError as error:
        raise GenerationConfigError(f"{path}: eos_token_id: {error}; correct the file") from error
    return GenerationConfig(
        temperature=0.0 if values.get("do_sample") is False else values.get("temperature"),
        top_k=values.get("top_k"),
        top_p=values.get("top_p"),
        min_p=values.get("min_p"),
        repetition_penalty=values.get("repetition_penalty"),
        max_new_tokens=values.get("max_new_tokens"),
        eos_token_ids=eos_token_ids,
        bos_token_id=values.get("bos_token_id"),
        pad_token_id=values.get("pad_token_id"),
        ignored=tuple(key for key in sorted(values) if not _acts_or_is_harmless(key, values[key])),
    )


def _acts_or_is_harmless(key: str, value: object) -> bool:
    if key in _RANGES or key == "eos_token_id" or key in _HARMLESS or key.startswith(("_", "output_", "assistant_")):
        return True
    return key in _NEUTRAL and value == _NEUTRAL[key]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _is_number(value: object) -> bool:
    # Sampling converts the number to a float, and an int may be too large for that.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _number_between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high


# Supported keys: the check of a value, and the expected value for the error.
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": (_number_between(0, math.inf), "a number of at least 0"),
    "top_k": (_is_count, "a whole number from 0 to 2147483647"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number over 0 and at most 1"),
    "min_p": (_number_between(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_number_between(*REPETITION_RANGE), "a number from {:g} to {:g}".format(*REPETITION_RANGE)),
    "max_new_tokens": (lambda value: _is_count(value) and value > 0, "a whole number from 1 to 2147483647"),
    "bos_token_id": (_is_id, "a token id"),
    "pad_token_id": (_is_id, "a token id"),
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
