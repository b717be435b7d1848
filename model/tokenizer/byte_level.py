"""Byte-level BPE as a `tiktoken.Encoding`. Torch-free."""

from collections.abc import Iterable, Mapping

import tiktoken

from model.tokenizer.interface import TokenizerError


class ByteLevelTokenizer:
    """A byte-level BPE. Every byte is a token, so every text can be encoded; see `interface.Tokenizer`.

    Args:
        pattern: regular expression that splits a text into pieces; merges never cross them.
        ranks: every token's bytes and id; a lower id merges first.
        special_tokens: name and id of each control mark.
        eos_token_ids, bos_token_id: the marks that end and begin a text.

    Raises:
        TokenizerError: an id stands for two tokens, a byte has no token, or an end mark does not exist.
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
        ids = [*ranks.values(), *special_tokens.values()]
        if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
            raise TokenizerError("token ids must be 0 or more, each for one token alone")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise TokenizerError(f"{len(missing)} of the 256 single bytes have no token, {missing[0]:#04x} first")
        self._token_bytes = [b""] * (max(ids) + 1)
        for token, rank in ranks.items():
            self._token_bytes[rank] = token
        for value in (*eos_token_ids, *([] if bos_token_id is None else [bos_token_id])):
            if not 0 <= value < len(self._token_bytes):
                raise TokenizerError(f"the mark {value} is not in the vocabulary of {len(self._token_bytes)}")
        self.pattern = pattern
        self.ranks: Mapping[bytes, int] = ranks
        self._special_tokens = special_tokens
        self._eos_token_ids = eos_token_ids
        self._bos_token_id = bos_token_id
        self._special_names = {number: name for name, number in special_tokens.items()}
        try:
            self._encoding = tiktoken.Encoding(
                name="kvasir", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except ValueError as error:
            raise TokenizerError(f"the split pattern cannot be used: {error}") from error

    @property
    def vocab_size(self) -> int:
        """See `interface.Tokenizer`."""
        return len(self._token_bytes)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """See `interface.Tokenizer`."""
        return self._special_tokens

    @property
    def bos_token_id(self) -> int | None:
        """See `interface.Tokenizer`."""
        return self._bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See `interface.Tokenizer`."""
        return self._eos_token_ids

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `interface.Tokenizer`.

        Raises:
            TokenizerError: the text is beyond the splitter's means, such as a million spaces in a row.
        """
        try:
            if parse_special:
                return self._encoding.encode(text, allowed_special="all")
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's splitter gives up by a Rust panic, which is no Exception and has no importable name.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                "the text cannot be split into tokens: a run of spaces or letters is too long"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """See `interface.Tokenizer`."""
        if token_id < 0:
            raise IndexError(token_id)
        return self._token_bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """See `interface.Tokenizer`."""
        return self._special_names.get(token_id) or self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `interface.Tokenizer`."""
        names = self._special_names
        parts = (names[i].encode() if i in names else self.token_bytes(i) for i in token_ids)
        return b"".join(parts).decode("utf-8", "replace")
