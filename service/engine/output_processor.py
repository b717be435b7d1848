"""Output of sequences: text, logprobs, embeddings and endings, as the `TokenDelta` events of committed steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.tokenizer.interface import Tokenizer
from service.engine.detokenizer import Detokenizer
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import Finish, TokenDelta, TokenLogprob


@dataclass(slots=True)
class EmbeddingSum:
    """Sum of the hidden states of one text, whose direction is its embedding.

    The sum is in float64, in which sums of float32 numbers within a factor of 2^19 of each other are exact. So the
    embedding is bitwise identical however the prompt is divided into chunks.
    """

    sum_E: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    def add(self, sum_E: NDArray[np.float64], *, start: int) -> None:
        """Add the sum of a chunk that begins at token `start`. The first chunk of a text resets the sum."""
        self.sum_E = self.sum_E + sum_E if start and len(self.sum_E) else sum_E

    def normalized(self) -> bytes:
        """Return the embedding, normalized to length 1, as native float32. Sum and mean have the same direction."""
        length = max(float(np.linalg.norm(self.sum_E)), float(np.finfo(np.float32).tiny))
        return (self.sum_E / length).astype(np.float32).tobytes()


class SequenceOutput:
    """Output state of one unfinished sequence: detokenizer, unreported prompt logprobs, and sum of hidden states."""

    def __init__(self, sequence: SequenceState, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self.embedding = EmbeddingSum()
        self._detokenizer = Detokenizer(tokenizer, sequence.params)
        self._prompt_logprobs: list[TokenLogprob] | None = None
        if sequence.params.prompt_logprobs is not None:
            first = TokenLogprob(token_id=sequence.token_ids[0], logprob=None, rank=None, top=())
            self._prompt_logprobs = [first]

    def add_prompt_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        """Add the logprobs of the next prompt tokens. The event of the first sampled token reports all of them."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs += logprobs

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[int, str, str | None]:
        """Detokenize new tokens of the sequence up to the first stop string.

        is_last: the sequence ends after these tokens, so held text is returned too.

        Returns:
            The number of tokens up to the stop string, the text that is safe to send, and the stop string or None.
        """
        text = ""
        for number, token_id in enumerate(token_ids, 1):
            pushed = self._detokenizer.push(token_id)
            text += pushed.text
            if pushed.stop is not None:
                return number, text, pushed.stop
        if not is_last:
            return len(token_ids), text, None
        flushed = self._detokenizer.flush()
        return len(token_ids), text + flushed.text, flushed.stop

    def token_delta(self, token_ids: Sequence[int], text: str, logprobs: tuple[TokenLogprob, ...] | None) -> TokenDelta:
        """Return the event of new tokens, which are the last tokens of the sequence."""
        sequence = self.sequence
        index = sequence.num_completion_tokens - len(token_ids)
        prompt_logprobs = None
        if self._prompt_logprobs is not None and index == sequence.num_prior_tokens:
            prompt_logprobs = tuple(self._prompt_logprobs)
        return TokenDelta(
            uid=sequence.uid,
            attempt=sequence.attempt,
            index=index,
            token_ids=tuple(token_ids),
            text=text,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=None if sequence.finish_reason is None else create_finish(sequence),
        )

    def ending(self, *, is_computed: bool) -> TokenDelta:
        """Return the final event of a sequence that ends without a new token.

        is_computed: the prompt has been computed, so its logprobs and its embedding are reported.
        """
        sequence, logprobs = self.sequence, self._prompt_logprobs
        return create_ending(
            sequence,
            text=self._detokenizer.flush().text,
            prompt_logprobs=tuple(logprobs) if is_computed and logprobs is not None else None,
            embedding=self.embedding.normalized() if is_computed and sequence.pooling is not None else None,
        )


def create_ending(
    sequence: SequenceState,
    *,
    error: str | None = None,
    text: str = "",
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None,
    embedding: bytes | None = None,
) -> TokenDelta:
    """Return the final event of a sequence, without a token."""
    return TokenDelta(
        uid=sequence.uid,
        attempt=sequence.attempt,
        index=sequence.num_completion_tokens,
        token_ids=(),
        text=text,
        logprobs=None,
        prompt_logprobs=prompt_logprobs,
        finish=create_finish(sequence, error),
        embedding=embedding,
    )


def create_finish(sequence: SequenceState, error: str | None = None) -> Finish:
    """Return the finish reason, token counts and timings of a finished sequence."""
    assert sequence.finish_reason is not None
    scheduled, first = sequence.first_scheduled_seconds, sequence.first_token_seconds
    last = sequence.last_token_seconds
    return Finish(
        reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=error,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_completion_tokens=sequence.num_completion_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        queue_seconds=0.0 if scheduled is None else scheduled - sequence.arrival_seconds,
        prefill_seconds=0.0 if scheduled is None or first is None else first - scheduled,
        decode_seconds=0.0 if first is None or last is None else last - first,
    )
