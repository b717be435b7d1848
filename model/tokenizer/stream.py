"""Incremental decoding of a stream of token ids to text."""

import codecs
from collections.abc import Sequence

from model.tokenizer.interface import Tokenizer


class StreamDecoder:
    """Incremental decoder that holds back the bytes of an incomplete character.

    The concatenated texts of all pushes and the flush are the text that the ids add to a non-empty text. Special
    tokens add nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._holds = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode more ids, and return the text that is complete. Special tokens have no text."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """Decode one id; see `push`. ASCII takes a faster path if no bytes are held back."""
        added = self._token_bytes(token_id)
        if added.isascii() and not self._holds:
            return added.decode("ascii")
        text = self._decoder.decode(added)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD if an incomplete character is held back, else an empty text."""
        self._holds = False
        return self._decoder.decode(b"", final=True)
