"""Output of sequences: text, logprobs, embeddings and endings, as the `TokenDelta` events of committed steps."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.tokenizer.interface import Tokenizer
from service.engine.detokenizer import Detokenizer
from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import Finish, TokenDelta, TokenLogprob


class SequenceOutput:
    """Output state of one unfinished sequence: detokenizer, prompt logprobs, and sum of hidden states.

    The sum is in float64, in which sums of float32 numbers within a factor of 2^19 of each other are exact. So the
    embedding is bitwise identical however the prompt is divided into chunks.
    """

    def __init__(self, sequence: SequenceState, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer, sequence.params)
        self._sum_E: NDArray[np.float64] = np.zeros(0)
        self._prompt_logprobs: list[TokenLogprob] | None = None
        if sequence.params.prompt_logprobs is not None:
            first = TokenLogprob(token_id=sequence.token_ids[0], logprob=None, rank=None, top=())
            self._prompt_logprobs = [first]

    def add_prompt_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        """Add the logprobs of the next prompt tokens. The event of the first sampled token reports all of them."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs += logprobs

    def add_hidden_states(self, sum_E: NDArray[np.float64], *, start: int) -> None:
        """Add the sum of a chunk that begins at token `start`. The first chunk of a text resets the sum."""
        self._sum_E = self._sum_E + sum_E if start and len(self._sum_E) else sum_E

    def prompt_logprobs_before(self, num_new_tokens: int) -> list[TokenLogprob] | None:
        """Return the prompt's logprobs if the last `num_new_tokens` tokens are the first that this attempt sampled."""
        sequence = self.sequence
        is_first = sequence.num_completion_tokens == sequence.num_prior_tokens + num_new_tokens
        return self._prompt_logprobs if is_first else None

    def ending(self, *, is_computed: bool) -> TokenDelta:
        """Return the final event of a sequence that ends without a new token.

        is_computed: the prompt has been computed, so its logprobs and its embedding are reported.
        """
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
    """Return an event of a sequence, whose last tokens are `token_ids`. Report the ending of a finished sequence."""
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
