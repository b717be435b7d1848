"""Output of sequences, as `TokenDelta` events: text up to the stop string, logprobs, embeddings and endings."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.chat.tool_formats.tool_format import safe_length
from model.sampling.params import SamplingParams
from model.tokenizer.interface import StreamDecoder, Tokenizer
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import Finish, TokenDelta, TokenLogprob


class Detokenizer:
    """Incremental detokenizer of one sequence: push each sampled token, then flush once.

    Text that may be the beginning of a stop string is held back. The text ends at the stop string that is complete
    first; of stop strings that end at the same character, the longest counts. The text of a stop token or a stop string
    is returned only if the request sets `include_stop_str_in_output`. The same holds for the name of an EOS token that
    ends the sequence, if the token is one of `visible_token_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer, params.visible_token_ids)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._hidden_ids = params.hidden_token_ids(tokenizer.eos_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_ids: Sequence[int], *, is_last: bool = False) -> tuple[int, str, str | None]:
        """Decode new tokens of the sequence up to the first stop string. `is_last`: return text that is held back too.

        Return the number of tokens that were decoded, the text that is safe to stream, and the stop string or None.
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
            end = min(safe_length(self._held, stop) for stop in self._stops)
            streamed += self._held[:end]
            self._held = self._held[end:]
        if not is_last:
            return len(token_ids), streamed, None
        text, stop = self.flush()
        return len(token_ids), streamed + text, stop

    def flush(self) -> tuple[str, str | None]:
        """Return the text still held back, cut at its first stop string, and this stop string or None."""
        self._held += self._decoder.flush()
        shown, stop = self._cut()
        if stop is None:
            shown, self._held = self._held, ""
        return shown, stop

    def _cut(self) -> tuple[str, str | None]:
        """Return the held-back text before the stop string that is complete first, and the stop string. Drop the rest.

        The text includes the stop string if the request asks for that. Without a stop string in the text, return "" and
        None, and keep the text.
        """
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if not found:
            return "", None
        end, start, stop = min(found)
        shown = self._held[: end if self._include_stop else start]
        self._held = ""
        return shown, stop


class SequenceOutput:
    """Output state of one unfinished sequence: detokenizer, prompt logprobs, and sum of hidden states (embeddings)."""

    def __init__(self, sequence: SequenceState, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer, sequence.params)
        # Sums in float64 are exact for float32 numbers within a factor of 2^19 of each other, in any prompt chunks.
        self._sum_E: NDArray[np.float64] = np.zeros(0)
        self._prompt_logprobs: list[TokenLogprob] | None = None
        if sequence.params.prompt_logprobs is not None:
            first = TokenLogprob(token_id=sequence.token_ids[0], logprob=None, rank=None, top=())
            self._prompt_logprobs = [first]

    def add_prompt_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        """Add the logprobs of the next prompt tokens. The first sampled token's event reports all prompt logprobs."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs += logprobs

    def add_hidden_states(self, sum_E: NDArray[np.float64], *, start: int) -> None:
        """Add the summed hidden states of the prompt chunk that begins at position `start`, for an embedding."""
        # The first chunk of a text resets the sum, as after a preemption.
        self._sum_E = self._sum_E + sum_E if start and len(self._sum_E) else sum_E

    def prompt_logprobs_before(self, num_new_tokens: int) -> list[TokenLogprob] | None:
        """Return the prompt logprobs if the last `num_new_tokens` tokens are the first of this attempt, else None."""
        sequence = self.sequence
        is_first = sequence.num_completion_tokens == sequence.num_prior_tokens + num_new_tokens
        return self._prompt_logprobs if is_first else None

    def ending(self, *, is_computed: bool) -> TokenDelta:
        """Return the event of a sequence that ends without a new token. `is_computed`: its whole prompt is computed."""
        sequence = self.sequence
        embedding: bytes | None = None
        if is_computed and sequence.pooling is not None:  # sum and mean have the same direction
            length = max(float(np.linalg.norm(self._sum_E)), float(np.finfo(np.float32).tiny))
            embedding = (self._sum_E / length).astype(np.float32).tobytes()
        text, _ = self.detokenizer.flush()
        prompt_logprobs = self._prompt_logprobs if is_computed else None
        return create_delta(sequence, text=text, prompt_logprobs=prompt_logprobs, embedding=embedding)


def create_delta(
    sequence: SequenceState,
    token_ids: Sequence[int] = (),
    text: str = "",
    *,
    logprobs: tuple[TokenLogprob, ...] | None = None,
    prompt_logprobs: Sequence[TokenLogprob] | None = None,
    embedding: bytes | None = None,
    error: str | None = None,
) -> TokenDelta:
    """Return the event of a sequence with new tokens, and with its ending if the sequence is finished."""
    finish = None
    if sequence.finish_reason is not None:
        arrival, scheduled = sequence.arrival_seconds, sequence.first_scheduled_seconds
        first, last = sequence.first_token_seconds, sequence.last_token_seconds
        finish = Finish(
            reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=error,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_completion_tokens=sequence.num_completion_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            queue_seconds=0.0 if scheduled is None else scheduled - arrival,
            prefill_seconds=0.0 if scheduled is None or first is None else first - scheduled,
            decode_seconds=0.0 if first is None or last is None else last - first,
        )
    return TokenDelta(
        uid=sequence.uid,
        attempt=sequence.attempt,
        index=sequence.num_completion_tokens - len(token_ids),
        token_ids=tuple(token_ids),
        text=text,
        logprobs=logprobs,
        prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        finish=finish,
        embedding=embedding,
    )
