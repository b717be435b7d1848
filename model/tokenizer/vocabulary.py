"""Decoding of token ids, the part of a tokenizer that needs no library. Torch-free."""

from collections.abc import Iterable, Mapping, Sequence

from model.tokenizer.interface import TokenizerError


class Vocabulary:
    """Base class that decodes ids, for every implementation of `interface.Tokenizer`.

    Args:
        token_bytes: the bytes that each id adds to a text; b"" for special tokens and unused ids.
        special_tokens: name and id of each special token.
        eos_token_ids, bos_token_id: the EOS tokens, and the BOS token if there is one.

    Raises:
        TokenizerError: the BOS or an EOS token is not in the vocabulary.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_tokens: Mapping[str, int],
        *,
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        for mark in (*eos_token_ids, *([] if bos_token_id is None else [bos_token_id])):
            if not 0 <= mark < len(token_bytes):
                raise TokenizerError(
                    f"the BOS or EOS id {mark} is not in the vocabulary of {len(token_bytes)} tokens; correct it"
                )
        self._token_bytes = token_bytes
        self._special_tokens = special_tokens
        self._special_names = {number: name for name, number in special_tokens.items()}
        self._eos_token_ids = eos_token_ids
        self._bos_token_id = bos_token_id
        self._longest_token: int | None = max(map(len, token_bytes), default=1)

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

    @property
    def longest_token(self) -> int | None:
        """See `interface.Tokenizer`."""
        return self._longest_token

    def token_bytes(self, token_id: int) -> bytes:
        """See `interface.Tokenizer`."""
        if token_id < 0:
            raise IndexError(token_id)
        return self._token_bytes[token_id]

    def format_token_name(self, token_id: int) -> str:
        """See `interface.Tokenizer`."""
        return self._special_names.get(token_id) or self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `interface.Tokenizer`."""
        return self.bytes_of(token_ids).decode("utf-8", "replace")

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """Return all bytes of these ids, special tokens by name."""
        names = self._special_names
        return b"".join(names[i].encode() if i in names else self.token_bytes(i) for i in token_ids)
