"""Incremental detokenization with stop strings.

Text that may be the beginning of a stop string is held back, so that no part of a stop string is streamed. The first
stop string to be complete ends the text. Of several stop strings that end at the same character, the longest wins. The
text of a stop token or a stop string is returned only with `include_stop_str_in_output`.
"""

from collections.abc import Sequence

from model.sampling.params import SamplingParams
from model.tokenizer.interface import StreamDecoder, Tokenizer


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

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> tuple[int, str, str | None]:
        """Decode new tokens up to the first stop string. Stop strings are ignored before `min_tokens`.

        is_last: the sequence ends after these tokens, so held text is returned too.

        Returns:
            The number of tokens up to the stop string, the text that is safe to stream, and the stop string or None.
        """
        streamed = ""
        for number, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            text = "" if token_id in self._hidden_ids else self._decoder.push_one(token_id)
            if not self._stops or self._num_tokens < self._min_tokens:
                streamed += text
                continue
            self._held += text
            shown, stop = self._cut()
            if stop is not None:
                return number, streamed + shown, stop
            end = len(self._held) - _num_that_may_begin(self._held, self._stops)
            streamed += self._held[:end]
            self._held = self._held[end:]
        if not is_last:
            return len(token_ids), streamed, None
        text, stop = self.flush()
        return len(token_ids), streamed + text, stop

    def flush(self) -> tuple[str, str | None]:
        """Return the held text at the end of the sequence, and the stop string that its last characters complete."""
        self._held += self._decoder.flush()
        shown, stop = self._cut()
        if stop is None:
            shown, self._held = self._held, ""
        return shown, stop

    def _cut(self) -> tuple[str, str | None]:
        """Remove the held text if it has a stop string. Return the text before, and the stop string that ends first."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if not found:
            return "", None
        end, start, stop = min(found)
        shown = self._held[: end if self._include_stop else start]
        self._held = ""
        return shown, stop


def _num_that_may_begin(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
