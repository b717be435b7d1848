"""Byte-level BPE as a `tiktoken.Encoding`. Torch-free."""

import itertools
from collections.abc import Mapping, Sequence

import tiktoken

from model.tokenizer.added_tokens import AddedToken, Preparation, TextSplitter
from model.tokenizer.interface import TokenizerError
from model.tokenizer.vocabulary import Vocabulary

# NFC, the only normalizer here, leaves at least a quarter of a text's bytes. The worst case known: U+0390 has 2 bytes,
# and its longest spelling (U+1FBE U+0308 U+0301) has 7.
NFC_SHRINKS = 4
# Ten times the largest vocabularies. A file may name any id, and a list with one entry for each id is allocated.
MAX_IDS = 2**22


class ByteLevelTokenizer(Vocabulary):
    """Byte-level BPE tokenizer. Every byte is a token, so every text can be encoded; see `interface.Tokenizer`.

    Args:
        pattern: regular expression that splits a text into pieces; merges never cross the border of a piece.
        ranks: bytes and rank of every token that a piece can become; pairs with a lower rank are merged first.
        special_tokens: name and id of each special token.
        eos_token_ids, bos_token_id: the EOS tokens, and the BOS token if there is one.
        ids: the id of each rank, with any value at a gap in the ranks; None if ids and ranks are equal.
        others: bytes of the ids that are neither in `ranks` nor in `special_tokens`.
        preparation: preparation of a text before it is split; None: no preparation.

    Raises:
        TokenizerError: an id is used by two tokens, or is negative or `MAX_IDS` or more; a byte has no token; the BOS
            or an EOS token is not in the vocabulary; or tiktoken cannot use the pattern.
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
        table = self._table(special_tokens, {} if others is None else others)
        super().__init__(table, special_tokens, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
        if self.preparation.normalize is not None:
            self._longest_token = max(map(len, table)) * NFC_SHRINKS
        added = self.preparation.added_tokens
        known = {token.id for token in added}
        marks = [AddedToken.mark(name, number) for name, number in special_tokens.items() if number not in known]
        self._with_marks = TextSplitter([*marks, *added], self.preparation)
        self._without_marks = TextSplitter([token for token in added if not token.special], self.preparation)
        try:
            self._encoding = tiktoken.Encoding(name="kvasir", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise TokenizerError(f"the split pattern cannot be used: {error}") from error

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `interface.Tokenizer`.

        Raises:
            TokenizerError: the splitter cannot handle the text, for example a million spaces in a row.
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

    def _encode_plain(self, text: str) -> list[int]:
        try:
            ranks = self._encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's splitter gives up with a Rust panic. It is not an Exception, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(
                "the text cannot be split into tokens: a run of spaces or letters is too long; shorten the run"
            ) from None
        return ranks if self._ids is None else [self._ids[rank] for rank in ranks]

    def _table(self, special_tokens: Mapping[str, int], others: Mapping[int, bytes]) -> list[bytes]:
        """Return the bytes of each id; b"" for special tokens and for unused ids."""
        ids = self._ids
        of_ranks = ((rank if ids is None else ids[rank], token) for token, rank in self.ranks.items())
        of_marks = ((token_id, b"") for token_id in special_tokens.values())
        table: dict[int, bytes] = {}
        for token_id, token in itertools.chain(of_ranks, others.items(), of_marks):
            if token_id < 0 or token_id in table:
                raise TokenizerError(f"token ids must be 0 or more and unique; {token_id} is not")
            if token_id >= MAX_IDS:  # every id below the largest takes a list entry
                raise TokenizerError(f"token ids must be under {MAX_IDS:,}; {str(token_id)[:20]} is not")
            table[token_id] = token
        return [table.get(token_id, b"") for token_id in range(max(table) + 1)]
