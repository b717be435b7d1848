"""Byte-level BPE with tiktoken, for tokenizers defined by a split pattern and a table of ranks. Torch-free."""

from collections.abc import Mapping

import regex
import tiktoken

from model.tokenizer.interface import Tokenizer, TokenizerError


class ByteLevelTokenizer(Tokenizer):
    """Byte-level BPE tokenizer. Every byte is a token, so every text can be encoded.

    Args:
        pattern: regular expression that splits a text into pieces; merges never cross the border of a piece.
        ranks: bytes and id of every ordinary token; pairs that join to a token with a lower id are merged first.
        special_tokens: name and id of each special token.
        eos_token_ids, bos_token_id: the EOS tokens, and the BOS token if there is one.

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
                f"{len(missing)} of the 256 single bytes have no token, {missing[0]:#04x} first; add them"
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
            raise TokenizerError(f"the split pattern cannot be used: {error}; correct it") from error

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `Tokenizer`.

        Raises:
            TokenizerError: the splitter cannot handle the text, for example a million spaces in a row.
        """
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
