"""Tokenizer metadata of GGUF files, made from the `tokenizers` library's tokenizers as by llama.cpp's converter."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library
from transformers.convert_slow_tokenizer import generate_merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPECIAL_TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]  # of <unk>, <s>, </s>, <0x00>, ... <0xFF>


def byte_level(library: Library, pre: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE tokenizer; `more`: further keys under tokenizer.ggml."""
    values = json.loads(library.to_str())
    tokens, types = _tokens(values)
    merges = [" ".join(merge) for merge in values["model"]["merges"]]
    own = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def sentencepiece(library: Library, **more: Any) -> dict[str, Any]:
    """Return the metadata of a SentencePiece BPE tokenizer whose scores fall with the ids."""
    tokens, types = _tokens(json.loads(library.to_str()))
    types[: len(_SPECIAL_TYPES)] = _SPECIAL_TYPES
    scores = [float(-number) for number in range(len(tokens))]
    own = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0}
    own |= {"bos_token_id": 1, "eos_token_id": 2, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def with_all_merges(library: Library) -> Library:
    """Return a library tokenizer that merges every pair of tokens which SentencePiece merges."""
    values = json.loads(library.to_str())
    vocabulary = values["model"]["vocab"]
    special = {token["content"] for token in values["added_tokens"]} | {f"<0x{byte:02X}>" for byte in range(256)}
    scores = {token: -token_id for token, token_id in vocabulary.items()}
    values["model"]["merges"] = generate_merges(vocabulary, scores, special)
    return Library.from_str(json.dumps(values))


def _tokens(values: dict[str, Any]) -> tuple[list[str], list[int]]:
    added = {token["id"]: token for token in values["added_tokens"]}
    ids = values["model"]["vocab"] | {token["content"]: token_id for token_id, token in added.items()}
    names = {token_id: name for name, token_id in ids.items()}
    tokens = [names.get(i, f"[PAD{i}]") for i in range(max(names) + 1)]
    kinds = {i: CONTROL if token["special"] else USER_DEFINED for i, token in added.items()}
    return tokens, [kinds.get(i, NORMAL if i in names else UNUSED) for i in range(len(tokens))]


def merged_by_hand(text: str, vocabulary: dict[str, int]) -> list[str]:
    """Return the pieces of a text by SentencePiece's BPE: neighbours that make the token of lowest id join first."""
    pieces = list(text)
    while len(pieces) > 1:
        joined = [vocabulary.get(a + b, np.inf) for a, b in pairwise(pieces)]
        best = int(np.argmin(joined))
        if joined[best] == np.inf:
            break
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces
