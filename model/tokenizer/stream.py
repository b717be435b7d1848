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
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._holds = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain once these ids are known. Special tokens have none."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """See `push`. ASCII, which is most of most texts, takes the short way where no bytes wait."""
        added = self._token_bytes(token_id)
        if added.isascii() and not self._holds:
            return added.decode("ascii")
        text = self._decoder.decode(added)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What was held back: U+FFFD for an unfinished character, or nothing."""
        self._holds = False
        return self._decoder.decode(b"", final=True)
