"""Default sampling parameters of a checkpoint: generation_config.json, or a GGUF file's metadata. Torch-free."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from model.gguf.container import is_gguf, read_gguf
from model.io.files import CheckpointError, read_json
from model.sampling.params import REPETITION_RANGE

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """Default sampling parameters of a checkpoint. None: the checkpoint's file does not set this parameter.

    temperature: 0 if the file has `do_sample: false`.
    ignored: keys of the file that would change a completion but are not supported.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()


def read_generation_config(directory: Path) -> GenerationConfig:
    """Read generation_config.json of a checkpoint directory, or a GGUF file's metadata.

    A missing generation_config.json sets no parameter.

    Raises:
        CheckpointError: the file is unreadable or not a JSON object, or a value has a wrong type or range.
    """
    path = generation_config_path(directory)
    found = _gguf_values(path) if path == directory else read_json(path, optional=True)
    values = {key: value for key, value in found.items() if value is not None}
    used: dict[str, Any] = {}
    for key in _TYPES.keys() & values.keys():
        try:
            used[key] = msgspec.convert(values[key], _TYPES[key])
        except (msgspec.ValidationError, OverflowError) as error:
            raise CheckpointError(f"{path}: {key}: {error}; correct the file") from error
    try:
        used["eos_token_ids"] = token_ids(values.get("eos_token_id"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; correct the file") from error
    if used.pop("do_sample", True) is False:
        used["temperature"] = 0.0
    known = {*_TYPES, "eos_token_id", *_HARMLESS, *(key for key in _NEUTRAL if values.get(key) == _NEUTRAL[key])}
    ignored = sorted(key for key in values.keys() - known if not key.startswith(_HARMLESS_PREFIXES))
    return GenerationConfig(**used, ignored=tuple(ignored))


def generation_config_path(directory: Path) -> Path:
    """Return the path of a checkpoint's default sampling parameters. Except for a GGUF file, it may not exist."""
    return directory if is_gguf(directory) else directory / GENERATION_CONFIG_FILE


def _gguf_values(path: Path) -> dict[str, object]:
    """Return the sampling parameters in a GGUF file's metadata, under their names in generation_config.json.

    Parameters without an effect are left out.
    """
    values: dict[str, object] = {}
    for key, value in read_gguf(path).scalars.items():
        name = key.removeprefix(_GGUF_PREFIX)
        if name != key and name not in _GGUF_HARMLESS and (name, value) not in _GGUF_NEUTRAL:
            values[_GGUF_NAMES.get(name, name)] = float(f"{value:.7g}") if isinstance(value, float) else value
    return values


def token_ids(value: object) -> tuple[int, ...]:
    """Return the distinct token ids in the JSON value of `eos_token_id`: null, one token id or a list of token ids.

    Raises:
        ValueError: the value has a different form.
    """
    try:
        ids = msgspec.convert([] if value is None else value, _TokenId | list[_TokenId])
    except msgspec.ValidationError:
        raise ValueError("eos_token_id must be null, a token id or a list of token ids") from None
    return tuple(dict.fromkeys(ids if isinstance(ids, list) else [ids]))


_TokenId = Annotated[int, Meta(ge=0)]
# Types of the supported keys' values. Counts have the same maximum as in requests.
_TYPES: Mapping[str, Any] = {
    "do_sample": bool,
    "temperature": Annotated[float, Meta(ge=0, le=sys.float_info.max)],
    "top_k": Annotated[int, Meta(ge=0, le=2**31 - 1)],
    "top_p": Annotated[float, Meta(gt=0, le=1)],
    "min_p": Annotated[float, Meta(ge=0, le=1)],
    "repetition_penalty": Annotated[float, Meta(ge=REPETITION_RANGE[0], le=REPETITION_RANGE[1])],
    "max_new_tokens": Annotated[int, Meta(ge=1, le=2**31 - 1)],
}
# Keys that change no completion: records, caches, speed, shape of Python results; BOS and padding are the tokenizer's.
_HARMLESS = {"use_cache", "max_matching_ngram_size", "disable_compile", "low_memory", "prefill_chunk_size"}
_HARMLESS_PREFIXES = (
    *("_", "assistant_", "bos_", "cache_", "compile_", "is_assistant", "num_assistant_", "output_", "pad_"),
    *("prompt_lookup_", "return_", "transformers_"),
)
_GGUF_PREFIX = "general.sampling."
_GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_GGUF_HARMLESS = {"mirostat_eta", "mirostat_tau", "penalty_last_n", "sequence", "xtc_threshold"}
_GGUF_NEUTRAL = {("mirostat", 0), ("xtc_probability", 0.0)}
# Keys of `transformers.GenerationConfig` that would change a completion, with the values at which they do not.
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
