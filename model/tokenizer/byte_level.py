"""Byte-level BPE as a `tiktoken.Encoding`. Torch-free."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import tiktoken

from model.tokenizer.added_tokens import AddedToken, Preparation, TextSplitter
from model.tokenizer.interface import TokenizerError


class ByteLevelTokenizer:
    """A byte-level BPE. Every byte is a token, so every text can be encoded; see `interface.Tokenizer`.

    Args:
        pattern: regular expression that splits a text into pieces; merges never cross them.
        ranks: the bytes and the rank of every token that a piece of text becomes; a lower rank merges first.
        special_tokens: name and id of each control mark.
        eos_token_ids, bos_token_id: the marks that end and begin a text.
        ids: the id of each rank, gaps in the ranks filled with anything; None where they are the same.
        others: bytes of the ids that stand in neither `ranks` nor `special_tokens`.
        preparation: what is done to a text before it is split; None for nothing.

    Raises:
        TokenizerError: an id stands for two tokens, a byte has no token, or a mark does not exist.
    """

    def __init__(
        self,
        *,
        pattern: str,
        ranks: dict[bytes, int],
        special_tokens: dict[str, int],
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
        ids: Sequence[int] | None = None,
        others: Mapping[int, bytes] | None = None,
        preparation: Preparation | None = None,
    ) -> None:
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise TokenizerError(f"{len(missing)} of the 256 single bytes have no token, {missing[0]:#04x} first")
        self.pattern = pattern
        self.ranks: Mapping[bytes, int] = ranks
        self.preparation = Preparation() if preparation is None else preparation
        self._ids = ids
        self._special_tokens = special_tokens
        self._special_names = {number: name for name, number in special_tokens.items()}
        self._eos_token_ids = eos_token_ids
        self._bos_token_id = bos_token_id
        self._token_bytes = self._table({} if others is None else others)
        added = self.preparation.added_tokens
        known = {token.id for token in added}
        marks = [AddedToken.mark(name, number) for name, number in special_tokens.items() if number not in known]
        self._with_marks = TextSplitter([*marks, *added], self.preparation)
        self._without_marks = TextSplitter([token for token in added if not token.special], self.preparation)
        try:
            self._encoding = tiktoken.Encoding(name="kvasir", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
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
        splitter = self._with_marks if parse_special else self._without_marks
        if splitter.is_idle:
            return self._encode_plain(text)
        token_ids: list[int] = []
        for part in splitter.split(text):
            if isinstance(part, int):
                token_ids.append(part)
            else:
                token_ids += self._encode_plain(part)
        return token_ids

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

    def _encode_plain(self, text: str) -> list[int]:
        try:
            ranks = self._encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's splitter gives up by a Rust panic, which is no Exception and has no importable name.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                "the text cannot be split into tokens: a run of spaces or letters is too long"
            ) from None
        return ranks if self._ids is None else [self._ids[rank] for rank in ranks]

    def _table(self, others: Mapping[int, bytes]) -> list[bytes]:
        """The bytes of every id, gaps without."""
        table: dict[int, bytes] = {}
        for token_id, token in self._all_tokens(others):
            if token_id < 0 or token_id in table:
                raise TokenizerError(f"token ids must be 0 or more, each for one token alone; {token_id} is not")
            table[token_id] = token
        for mark in (*self._eos_token_ids, *([] if self._bos_token_id is None else [self._bos_token_id])):
            if mark not in table:
                raise TokenizerError(f"the mark {mark} is not in the vocabulary")
        return [table.get(token_id, b"") for token_id in range(max(table) + 1)]

    def _all_tokens(self, others: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        ids = self._ids
        yield from ((rank if ids is None else ids[rank], token) for token, rank in self.ranks.items())
        yield from others.items()
        yield from ((token_id, b"") for token_id in self._special_tokens.values())
