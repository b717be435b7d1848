"""Tokenizer files of Kvasir checkpoints.

`tokenizer.tiktoken` has tiktoken's format: one `base64(bytes) rank` a line. `tokenizer_spec.json` holds the split
pattern, the special tokens, and the BOS and EOS ids. `eos_token_id` is an integer, or a list if several tokens end a
text.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.io.json_file import read_bytes, read_object
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.interface import TokenizerError, naming

RANKS_FILE = "tokenizer.tiktoken"
SPEC_FILE = "tokenizer_spec.json"
_WANTED = {
    "pattern": "a regular expression",
    "special_tokens": "an object of names and integers",
    "eos_token_id": "the id of a special token, or a list of different ones",
    "bos_token_id": "the id of a special token, or null",
}
_KEYS = set(_WANTED)


def save_native(tokenizer: ByteLevelTokenizer, directory: Path) -> None:
    """Write both files.

    Raises:
        ValueError: the tokenizer has no EOS token, so no text would ever end.
    """
    if not (ends := tokenizer.eos_token_ids):
        raise ValueError("the tokenizer has no EOS token; give it one in eos_token_ids")
    lines = sorted(tokenizer.ranks.items(), key=lambda item: item[1])
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in lines)
    (directory / RANKS_FILE).write_text(text)
    spec = {
        "pattern": tokenizer.pattern,
        "special_tokens": dict(tokenizer.special_tokens),
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "bos_token_id": tokenizer.bos_token_id,
    }
    (directory / SPEC_FILE).write_text(json.dumps(spec, indent=2) + "\n")


def load_native(directory: Path) -> ByteLevelTokenizer:
    """Read the files that `save_native` wrote.

    Raises:
        TokenizerError: a file is missing or unusable.
    """
    ranks = read_ranks(directory / RANKS_FILE)
    with naming(SPEC_FILE):
        spec = read_object(directory / SPEC_FILE)
    if set(spec) != _KEYS:
        raise TokenizerError(f"{SPEC_FILE}: expected the keys {', '.join(sorted(_KEYS))}; copy the file again")
    _check_types(spec)
    ids = sorted([*ranks.values(), *spec["special_tokens"].values()])
    if ids != list(range(len(ids))):
        raise TokenizerError(
            f"{RANKS_FILE}: token ids must be 0 to {len(ids) - 1} without gaps or repeats; copy the file again"
        )
    ends = _ids(spec.pop("eos_token_id"))
    for name, value in (*(("eos_token_id", end) for end in ends), ("bos_token_id", spec["bos_token_id"])):
        if value is not None and value not in spec["special_tokens"].values():
            raise TokenizerError(f"{SPEC_FILE}: {name}={value} is not a special token; correct it")
    with naming(SPEC_FILE):
        return ByteLevelTokenizer(ranks=ranks, eos_token_ids=ends, **spec)


def _check_types(spec: Mapping[str, Any]) -> None:
    """Raise TokenizerError for the first value of tokenizer_spec.json that has a wrong type."""
    marks = spec["special_tokens"]
    is_good = {
        "pattern": isinstance(spec["pattern"], str) and spec["pattern"] != "",
        "special_tokens": isinstance(marks, dict) and all(name and type(value) is int for name, value in marks.items()),
        "eos_token_id": bool(ends := _ids(spec["eos_token_id"]))
        and all(type(end) is int for end in ends)
        and len(set(ends)) == len(ends),
        "bos_token_id": spec["bos_token_id"] is None or type(spec["bos_token_id"]) is int,
    }
    wrong = next((key for key, good in is_good.items() if not good), None)
    if wrong is not None:
        raise TokenizerError(f"{SPEC_FILE}: {wrong} must be {_WANTED[wrong]}; copy the file again")


def _ids(value: Any) -> tuple[Any, ...]:
    """Return the items of a list, or a single value, as a tuple."""
    return tuple(value) if isinstance(value, list) else (value,)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read tokens and ranks from a file in tiktoken's format, one `base64(bytes) rank` a line.

    Raises:
        TokenizerError: the file cannot be read, or a line has another format.
    """
    ranks: dict[bytes, int] = {}
    with naming(path.name):
        lines = read_bytes(path).splitlines()
    for line in lines:
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:  # includes binascii.Error
            raise TokenizerError(
                f"{path.name}, line {len(ranks) + 1}: expected `base64 rank`; copy the file again"
            ) from error
    return ranks
