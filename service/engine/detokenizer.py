"""Incremental detokenization with stop strings.

Text that may be the beginning of a stop string is held back, so that no part of a stop string is streamed. The first
stop string to be complete ends the text. Of several stop strings that end at the same character, the longest wins. The
text of a stop token or a stop string is returned only with `include_stop_str_in_output`.
"""

import msgspec

from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer
from model.tokenizer.stream import StreamDecoder


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text that is safe to stream, and the stop string that ended the text, or None."""

    text: str
    stop: str | None


class Detokenizer:
    """Detokenizer of one sequence: push each sampled token, then flush once."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._hidden_ids = frozenset(() if params.include_stop_str_in_output else params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> TextDelta:
        """Return the text that a token makes safe to stream. Stop strings are ignored before `min_tokens`."""
        self._num_tokens += 1
        text = "" if token_id in self._hidden_ids else self._decoder.push_one(token_id)
        if not self._stops or self._num_tokens < self._min_tokens:
            return TextDelta(text, None)
        self._held += text
        found = _first_complete(self._held, self._stops)
        if found is not None:
            start, stop = found
            shown = self._held[: start + len(stop)] if self._include_stop else self._held[:start]
            self._held = ""
            return TextDelta(shown, stop)
        num_held = _num_that_may_begin(self._held, self._stops)
        shown, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return TextDelta(shown, None)

    def flush(self) -> TextDelta:
        """Return the held text at the end of the sequence. The decoder's last characters may complete a stop string."""
        self._held += self._decoder.flush()
        found = _first_complete(self._held, self._stops)
        if found is None:
            shown, stop = self._held, None
        else:
            start, stop = found
            shown = self._held[: start + len(stop)] if self._include_stop else self._held[:start]
        self._held = ""
        return TextDelta(shown, stop)


def _first_complete(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the start and the text of the stop string that is complete first; None without a match."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _num_that_may_begin(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
