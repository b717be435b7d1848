"""Text to token ids and back: a byte-level BPE as a `tiktoken.Encoding`, stored with its checkpoint. Torch-free.

On disk: `tokenizer.tiktoken` holds one `base64(bytes) rank` a line, tiktoken's own format; `tokenizer_spec.json` holds
the split pattern, the special tokens and which of them begin and end a text.
"""

import base64
import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import tiktoken

RANKS_FILE = "tokenizer.tiktoken"
SPEC_FILE = "tokenizer_spec.json"


class TokenizerError(ValueError):
    """A tokenizer's files are missing, damaged or do not fit together. The message names the file."""


class Tokenizer:
    """A byte-level BPE. Every byte is a token, so every text can be encoded and every id decoded.

    `special_tokens` (name -> id) are control marks: text that looks like one is encoded as ordinary text, because a
    user's text must not be able to speak with the model's control voice.

    Args:
        pattern: regular expression that splits a text into pieces; merges never cross them.
        ranks: every token's bytes and id; a lower id merges first.
        special_tokens: name and id of each control mark.
        eos_token_id, bos_token_id: the marks that end and begin a text.

    Raises:
        TokenizerError: ids have gaps, a byte has no token, or an end mark is not special.
    """

    def __init__(
        self,
        *,
        pattern: str,
        ranks: dict[bytes, int],
        special_tokens: dict[str, int],
        eos_token_id: int,
        bos_token_id: int | None,
    ) -> None:
        ids = sorted([*ranks.values(), *special_tokens.values()])
        if ids != list(range(len(ids))):
            raise TokenizerError(f"token ids must be 0 to {len(ids) - 1} without gaps or repeats")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise TokenizerError(f"{len(missing)} of the 256 single bytes have no token, {missing[0]:#04x} first")
        for name, value in (("eos_token_id", eos_token_id), ("bos_token_id", bos_token_id)):
            if value is not None and value not in special_tokens.values():
                raise TokenizerError(f"{name}={value} is not a special token")
        self.pattern = pattern
        self.special_tokens = special_tokens
        self.eos_token_id = eos_token_id
        self.bos_token_id = bos_token_id
        self._ranks = ranks
        self._token_bytes = [b""] * len(ids)
        for token, rank in ranks.items():
            self._token_bytes[rank] = token
        self._special_names = {number: name for name, number in special_tokens.items()}
        try:
            self._encoding = tiktoken.Encoding(
                name="kvasir", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except ValueError as error:
            raise TokenizerError(f"the split pattern cannot be used: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return len(self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special marks in it taken as ordinary text.

        Lone surrogates, which no UTF-8 can hold but JSON can name, become U+FFFD.

        Raises:
            TokenizerError: the text is beyond the splitter's means, such as a million spaces in a row.
        """
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's splitter gives up by a Rust panic, which is no Exception and has no importable name.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                "the text cannot be split into tokens: a run of spaces or letters is too long"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for a special token.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
        if token_id < 0:
            raise IndexError(token_id)
        return self._token_bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """How to show a token alone: its text, with broken characters as U+FFFD, or a special token's name."""
        return self._special_names.get(token_id) or self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids, special tokens by name, bytes that are no UTF-8 as U+FFFD."""
        names = self._special_names
        parts = (names[i].encode() if i in names else self.token_bytes(i) for i in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    def save(self, directory: Path) -> None:
        """Write both files."""
        lines = sorted(self._ranks.items(), key=lambda item: item[1])
        text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in lines)
        (directory / RANKS_FILE).write_text(text)
        spec = {
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
        }
        (directory / SPEC_FILE).write_text(json.dumps(spec, indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            TokenizerError: a file is missing or unusable.
        """
        ranks: dict[bytes, int] = {}
        try:
            lines = (directory / RANKS_FILE).read_bytes().splitlines()
        except OSError as error:
            raise TokenizerError(f"{RANKS_FILE}: {error.strerror}") from error
        for line in lines:
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:  # binascii.Error is one
                raise TokenizerError(f"{RANKS_FILE}, line {len(ranks) + 1}: expected `base64 rank`") from error
        try:
            spec = json.loads((directory / SPEC_FILE).read_text())
            keys = {"pattern", "special_tokens", "eos_token_id", "bos_token_id"}
            if not isinstance(spec, dict) or set(spec) != keys:
                raise TokenizerError(f"{SPEC_FILE}: expected the keys {', '.join(sorted(keys))}")
            return cls(ranks=ranks, **spec)
        except OSError as error:
            raise TokenizerError(f"{SPEC_FILE}: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{SPEC_FILE}: not JSON: {error}") from error


class StreamDecoder:
    """Ids in, text out, never half a character: bytes that may begin one wait for the rest.

    The texts of all pushes and the flush, joined, equal the decoding of all ids at once without special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain once these ids are known. Special tokens have none."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, token_ids)))

    def flush(self) -> str:
        """What was held back: U+FFFD for an unfinished character, or nothing."""
        return self._decoder.decode(b"", final=True)
