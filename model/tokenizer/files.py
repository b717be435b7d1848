"""Loading of a checkpoint's tokenizer in the format of Kvasir, Hugging Face, OpenAI, Meta or llama.cpp.

A bare `*.tiktoken` file holds only tokens and ranks. Its SHA-256 identifies the split pattern and the special tokens,
which are from tiktoken's `openai_public.py` (MIT); for Llama 3's `tokenizer.model`, from Meta's `llama3/tokenizer.py`.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from model.gguf.container import is_gguf
from model.io.files import CheckpointError, check_is_file, file_digest, parsing, read_bytes, read_json, read_text
from model.system.c_library import trim_heap
from model.tokenizer.bos_eos import TokenizerConfig, read_eos_token_ids, read_tokenizer_config
from model.tokenizer.byte_level import RANKS_FILE, SPEC_FILE, ByteLevelTokenizer, load_native, read_ranks
from model.tokenizer.gguf_vocabulary import load_gguf_tokenizer
from model.tokenizer.interface import Tokenizer
from model.tokenizer.split_patterns import CL100K_PATTERN, GPT2_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN
from model.tokenizer.tokenizer_json import (
    BYTE_LEVEL_DECODER,
    TOKENIZER_FILE,
    added_token,
    pre_tokenizer_for,
    tokenizer_from_json,
)

_END_OF_TEXT = "<|endoftext|>"
# Attributes of a tokenizer that its base class has set.
_DECODING = (
    *("_token_bytes", "_special_names", "special_tokens", "eos_token_ids", "bos_token_id"),
    *("vocab_size", "kind", "longest_token"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Published:
    """Name, split pattern and special tokens that belong to a published file of ranks (*.tiktoken)."""

    name: str
    pattern: str
    special_tokens: Mapping[str, int]


# Llama 3 has 256 special tokens, ids 128000 to 128255; a reserved token's name is for display only.
_LLAMA3_NAMES = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_RESERVED = [index for index in range(256) if index not in _LLAMA3_NAMES]
_LLAMA3_NAMES |= {index: f"<|reserved_special_token_{number}|>" for number, index in enumerate(_RESERVED)}
_LLAMA3 = _Published(
    name="llama3",
    pattern=LLAMA3_PATTERN,
    special_tokens={_LLAMA3_NAMES[index]: 128_000 + index for index in range(256)},
)
_PUBLISHED: Mapping[str, _Published] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _Published(
        name="r50k_base", pattern=GPT2_PATTERN, special_tokens={_END_OF_TEXT: 50256}
    ),
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": _Published(
        name="p50k_base", pattern=GPT2_PATTERN, special_tokens={_END_OF_TEXT: 50256}
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": _Published(
        name="cl100k_base",
        pattern=CL100K_PATTERN,
        special_tokens={
            _END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": _Published(
        name="o200k_base", pattern=O200K_PATTERN, special_tokens={_END_OF_TEXT: 199999, "<|endofprompt|>": 200018}
    ),
}
_SAVE_FAST_TOKENIZER = (
    "save the fast tokenizer beside it: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
)
_KNOWN = ", ".join(published.name for published in _PUBLISHED.values())
# Split pattern and normalizer by `transformers` tokenizer class, because vocab.json and merges.txt contain neither.
_SPLITS: Mapping[str, tuple[str, dict[str, str] | None]] = {
    "GPT2Tokenizer": (GPT2_PATTERN, None),
    "Qwen2Tokenizer": (QWEN_PATTERN, {"type": "NFC"}),
}


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory or GGUF file. Raises CheckpointError for missing or bad files."""
    if is_gguf(directory):
        return load_gguf_tokenizer(directory)
    for name, load in _LOADERS.items():
        if os.path.lexists(directory / name):
            return load(directory)
    if len(ranks := list(directory.glob("*.tiktoken"))) == 1:
        return _load_published_ranks(ranks[0])
    raise CheckpointError(f"{directory}: no tokenizer; expected one of {', '.join(_LOADERS)} or one *.tiktoken file")


class LateTokenizer(Tokenizer):
    """Copy of a loaded tokenizer, for another process: decodes at once, and loads the files when it first encodes.

    With 152,000 tokens, the copy is received in 0.02 s, and the files take 0.4 s.
    """

    def __init__(self, tokenizer: Tokenizer, directory: Path) -> None:
        self._share_tables(tokenizer)
        self._directory = directory

    def _share_tables(self, tokenizer: Tokenizer) -> None:
        for name in _DECODING:
            setattr(self, name, getattr(tokenizer, name))

    @cached_property
    def _loaded(self) -> Tokenizer:
        loaded = load_tokenizer(self._directory)
        self._share_tables(loaded)
        trim_heap()  # frees the first tables, 8 MB, and parsed JSON, 63 MB
        return loaded

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self._loaded.encode(text, parse_special=parse_special)

    def find_token(self, name: str) -> int | None:
        return self._loaded.find_token(name)

    def decode(self, token_ids: Iterable[int]) -> str:
        return self._loaded.decode(token_ids)


def _load_json(directory: Path) -> Tokenizer:
    path = directory / TOKENIZER_FILE
    return tokenizer_from_json(path, read_json(path), read_tokenizer_config(directory))


def _load_published_ranks(path: Path) -> Tokenizer:
    """Load the tokenizer of a published *.tiktoken file. Raises CheckpointError for a file with an unknown SHA-256."""
    check_is_file(path)
    digest = file_digest(path)
    if (published := _PUBLISHED.get(digest)) is None:
        raise CheckpointError(
            f"{path}: the SHA-256 {digest[:16]}… matches no known file ({_KNOWN}), so the split pattern is "
            "unknown; copy the file again, or add a tokenizer.json"
        )
    return _from_ranks(path, published)


def _load_tokenizer_model(directory: Path) -> Tokenizer:
    """Load the tokenizer of Llama 3's `tokenizer.model`. Raises CheckpointError, also for a SentencePiece model."""
    path = directory / "tokenizer.model"
    read_bytes(path)  # an unreadable file has its own error
    try:
        ranks = read_ranks(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: a SentencePiece model, which is not supported; {_SAVE_FAST_TOKENIZER}"
        ) from error
    if len(ranks) != 128_000:
        raise CheckpointError(f"{path}: {len(ranks)} tokens, expected Llama 3's 128000; add a tokenizer.json")
    return _from_ranks(path, _LLAMA3)


def _load_merges(directory: Path, *, vocabulary_file: str, merges_file: str) -> Tokenizer:
    """Load the tokenizer of vocab.json and merges.txt, which OpenAI called encoder.json and vocab.bpe.

    Raises CheckpointError for a tokenizer class other than those of GPT-2 and Qwen 2.
    """
    config, path = read_tokenizer_config(directory), directory / vocabulary_file
    name = ("GPT2Tokenizer" if config.tokenizer_class is None else config.tokenizer_class).removesuffix("Fast")
    if name not in _SPLITS:
        raise CheckpointError(
            f"{path}: the split pattern of the tokenizer class {name} is unknown; {_SAVE_FAST_TOKENIZER}"
        )
    pattern, normalizer = _SPLITS[name]
    vocabulary = read_json(path)
    if _END_OF_TEXT in vocabulary:  # GPT-2's own files name no EOS token
        config = replace(config, roles={"eos_token": _END_OF_TEXT, **config.roles})
    merges_path = directory / merges_file
    merges = [line for line in read_text(merges_path).split("\n") if line and not line.startswith("#version")]
    if wrong := next((line for line in merges if line.count(" ") != 1), None):
        raise CheckpointError(f"{merges_path}: expected two tokens a line, not {wrong!r}; copy the file again")
    values = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer_for(pattern),
        "decoder": BYTE_LEVEL_DECODER,
        "added_tokens": _special_tokens(directory, vocabulary, config),
    }
    return tokenizer_from_json(path, values, config)


def _special_tokens(directory: Path, vocabulary: Mapping[str, int], config: TokenizerConfig) -> list[dict[str, Any]]:
    """Return entries of `added_tokens` for `<|endoftext|>`, the config's special tokens and those of added_tokens.json.

    Names without an id are left out.
    """
    ids = {**vocabulary, **read_json(directory / "added_tokens.json", optional=True)}
    names = {_END_OF_TEXT, *config.special, *(ids.keys() - vocabulary.keys())} & ids.keys()
    return [added_token(name, ids[name]) for name in sorted(names, key=ids.__getitem__)]


def _from_ranks(path: Path, published: _Published) -> Tokenizer:
    special = published.special_tokens
    ranks = read_ranks(path)
    vocabulary = {**{str(rank): rank for rank in ranks.values()}, **special}
    eos_token_ids = read_eos_token_ids(path.parent, read_tokenizer_config(path.parent), vocabulary)
    default = tuple(special[name] for name in (_END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>") if name in special)
    with parsing(path):
        return ByteLevelTokenizer(
            pattern=published.pattern,
            ranks=ranks,
            special_tokens=dict(special),
            eos_token_ids=eos_token_ids or default,
            bos_token_id=special.get("<|begin_of_text|>"),
        )


_LOADERS: Mapping[str, Callable[[Path], Tokenizer]] = {
    SPEC_FILE: load_native,
    RANKS_FILE: load_native,
    TOKENIZER_FILE: _load_json,
    "vocab.json": partial(_load_merges, vocabulary_file="vocab.json", merges_file="merges.txt"),
    "encoder.json": partial(_load_merges, vocabulary_file="encoder.json", merges_file="vocab.bpe"),
    "tokenizer.model": _load_tokenizer_model,
}
