"""Ids to text that is safe to show, and stop strings.

Text is held back while it could be the beginning of a stop string, so that nobody ever sees a character of one. Of
several stop strings the one that is complete first counts, and of those that end together the longest. A stop token's
text is shown only where a stop string would be.
"""

import msgspec

from model.sampling_params import SamplingParams
from model.tokenizer.interface import Tokenizer
from model.tokenizer.stream import StreamDecoder


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text that may be shown now, and the stop string that ended the text, if one did."""

    text: str
    stop: str | None


class Detokenizer:
    """The text of one sequence. Push its tokens as they come, then flush once."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._hidden_ids = frozenset(() if params.include_stop_str_in_output else params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> TextDelta:
        """One more token. A stop string that is complete before `min_tokens` is text like any other."""
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
        """What was held back; the end of the text may complete a stop string as any token may."""
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
    """Where the stop string that ends first begins, and which it is."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _num_that_may_begin(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
