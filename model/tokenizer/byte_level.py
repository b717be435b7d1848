"""Byte-level BPE as a `tiktoken.Encoding`. Torch-free."""

import itertools
from collections.abc import Mapping, Sequence

import tiktoken

from model.tokenizer.added_tokens import AddedToken, Preparation, TextSplitter
from model.tokenizer.interface import TokenizerError
from model.tokenizer.vocabulary import Vocabulary

# NFC is the only normalizer here. It leaves a quarter at least: U+0390 has 2 bytes, or 7 when spelled out.
NFC_SHRINKS = 4
# Ten times the largest vocabularies. A file may name any number, and a list of so many places is made.
MAX_IDS = 2**22


class ByteLevelTokenizer(Vocabulary):
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
        TokenizerError: an id stands for two tokens or is absurdly large, a byte has no token, or a mark does not exist.
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

    def _table(self, special_tokens: Mapping[str, int], others: Mapping[int, bytes]) -> list[bytes]:
        """The bytes of every id, gaps without."""
        ids = self._ids
        of_ranks = ((rank if ids is None else ids[rank], token) for token, rank in self.ranks.items())
        of_marks = ((token_id, b"") for token_id in special_tokens.values())
        table: dict[int, bytes] = {}
        for token_id, token in itertools.chain(of_ranks, others.items(), of_marks):
            if token_id < 0 or token_id in table:
                raise TokenizerError(f"token ids must be 0 or more, each for one token alone; {token_id} is not")
            if token_id >= MAX_IDS:  # each id below the largest takes a place
                raise TokenizerError(f"token ids must be under {MAX_IDS:,}; {str(token_id)[:20]} is not")
            table[token_id] = token
        return [table.get(token_id, b"") for token_id in range(max(table) + 1)]
