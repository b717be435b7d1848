"""Text from a stream of ids, never half a character."""

import codecs
from collections.abc import Sequence

from model.tokenizer.interface import Tokenizer


class StreamDecoder:
    """Ids in, text out, never half a character: bytes that may begin one wait for the rest.

    The texts of all pushes and the flush, joined, are what these ids add to a text that stands already, special tokens
    left out.
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
