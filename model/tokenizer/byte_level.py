"""Byte-level BPE with tiktoken, and the tokenizer files of Kvasir checkpoints. Torch-free.

`tokenizer.tiktoken` has one `base64(bytes) rank` a line. `tokenizer_spec.json` holds the split pattern, the special
tokens, and the BOS and EOS ids; `eos_token_id` is an integer, or a list if several tokens end a text.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import regex
import tiktoken
from msgspec import Meta

from model.io.files import CheckpointError, parsing, read_bytes, read_json, write_json
from model.tokenizer.interface import Tokenizer, TokenizerError

RANKS_FILE = "tokenizer.tiktoken"
SPEC_FILE = "tokenizer_spec.json"


class ByteLevelTokenizer(Tokenizer):
    """Byte-level BPE tokenizer. Every byte is a token, so every text can be encoded.

    Args:
        pattern: regular expression that splits a text into pieces; merges never cross the border of a piece.
        ranks: id of every ordinary token, by its bytes; pairs that join to a token with a lower id are merged first.

    Raises:
        TokenizerError: a byte has no token, tiktoken cannot use the pattern, or an id is wrong; see `Tokenizer`.
    """

    def __init__(
        self,
        *,
        pattern: str,
        ranks: dict[bytes, int],
        special_tokens: dict[str, int],
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise TokenizerError(
                f"the tokenizer has no token for {len(missing)} of the 256 bytes, such as {missing[0]:#04x}; add them"
            )
        token_bytes = ((token_id, token) for token, token_id in ranks.items())
        super().__init__(token_bytes, special_tokens, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
        self.pattern = pattern
        self.ranks: Mapping[bytes, int] = ranks
        # Not tiktoken's own search: of two special tokens at one position, the longer one must be found.
        names = sorted(special_tokens, key=len, reverse=True)
        self._special_pattern = regex.compile(f"({'|'.join(map(regex.escape, names))})") if names else None
        try:
            self._encoding = tiktoken.Encoding(name="kvasir", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise TokenizerError(f"the split pattern (key pattern) cannot be used: {error}; correct it") from error

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        if not parse_special or self._special_pattern is None:
            return self._encode_ordinary(text)
        token_ids: list[int] = []
        for index, part in enumerate(self._special_pattern.split(text)):
            if index % 2:
                token_ids.append(self.special_tokens[part])
            else:
                token_ids += self._encode_ordinary(part)
        return token_ids

    def _encode_ordinary(self, text: str) -> list[int]:
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's splitter gives up with a Rust panic. It is not an Exception, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                "the text cannot be split into tokens: a run of spaces or letters is too long; shorten the run"
            ) from None


def save_native(tokenizer: ByteLevelTokenizer, directory: Path) -> None:
    """Write a Kvasir checkpoint's tokenizer files, tokenizer.tiktoken and tokenizer_spec.json, to a directory.

    Raises:
        ValueError: the tokenizer has no EOS token, so no text would ever end.
    """
    if not (ends := tokenizer.eos_token_ids):
        raise ValueError("the tokenizer has no EOS token; give at least one id in eos_token_ids")
    lines = sorted(tokenizer.ranks.items(), key=lambda item: item[1])
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in lines)
    (directory / RANKS_FILE).write_text(text)
    spec = {
        "pattern": tokenizer.pattern,
        "special_tokens": dict(tokenizer.special_tokens),
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
        "bos_token_id": tokenizer.bos_token_id,
    }
    write_json(directory / SPEC_FILE, spec)


class _Spec(msgspec.Struct, forbid_unknown_fields=True):
    """Content of tokenizer_spec.json."""

    pattern: Annotated[str, Meta(min_length=1)]
    special_tokens: dict[Annotated[str, Meta(min_length=1)], int]
    eos_token_id: int | Annotated[list[int], Meta(min_length=1)]
    bos_token_id: int | None


def load_native(directory: Path) -> ByteLevelTokenizer:
    """Load a tokenizer from tokenizer.tiktoken and tokenizer_spec.json of a directory. Raises CheckpointError."""
    ranks, path = read_ranks(directory / RANKS_FILE), directory / SPEC_FILE
    try:
        spec = msgspec.convert(read_json(path), _Spec)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}; copy the file again") from error
    ids = sorted([*ranks.values(), *spec.special_tokens.values()])
    if ids != list(range(len(ids))):
        raise CheckpointError(
            f"{directory / RANKS_FILE}: token ids must be 0 to {len(ids) - 1} without gaps or repeats; "
            "copy the file again"
        )
    ends = tuple(spec.eos_token_id) if isinstance(spec.eos_token_id, list) else (spec.eos_token_id,)
    for token_id in (*ends, *([] if spec.bos_token_id is None else [spec.bos_token_id])):
        if token_id not in spec.special_tokens.values() or ends.count(token_id) > 1:
            raise CheckpointError(
                f"{path}: the BOS or EOS id {token_id} is not a special token, or is listed twice; correct it"
            )
    with parsing(path):
        return ByteLevelTokenizer(
            pattern=spec.pattern,
            ranks=ranks,
            special_tokens=spec.special_tokens,
            eos_token_ids=ends,
            bos_token_id=spec.bos_token_id,
        )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return each token's rank, by its bytes, from a file of lines `base64(bytes) rank`. Raises CheckpointError."""
    ranks: dict[bytes, int] = {}
    for line in read_bytes(path).splitlines():
        try:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError as error:  # includes binascii.Error
            raise CheckpointError(
                f"{path}, line {len(ranks) + 1}: expected `base64 rank`; copy the file again"
            ) from error
    return ranks
