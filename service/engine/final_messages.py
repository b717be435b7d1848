"""Final messages of a sequence: its last `TokenDelta` and its `Finish`."""

from service.engine.scheduling.sequence import SequenceState
from service.ipc.messages import Finish, TokenDelta, TokenLogprob


def ending(
    sequence: SequenceState,
    *,
    finish: Finish,
    text: str = "",
    prompt_logprobs: list[TokenLogprob] | None = None,
    embedding: bytes | None = None,
) -> TokenDelta:
    """Return the final `TokenDelta` of a sequence, without a token."""
    return TokenDelta(
        uid=sequence.uid,
        attempt=sequence.attempt,
        index=sequence.num_completion_tokens,
        token_ids=(),
        text=text,
        logprobs=None,
        prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        finish=finish,
        embedding=embedding,
    )


def create_finish(sequence: SequenceState, error: str | None = None) -> Finish:
    """Return the finish reason, token counts and timings of a finished sequence."""
    assert sequence.finish_reason is not None
    scheduled, first, last = (
        sequence.first_scheduled_seconds,
        sequence.first_token_seconds,
        sequence.last_token_seconds,
    )
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


def no_token(sequence: SequenceState) -> str:
    """Return the error message for a request whose rules forbid every next token."""
    return (
        f"no token may follow the {sequence.num_completion_tokens} tokens of this completion: allowed_token_ids, "
        "bad_words, min_tokens and the grammar together forbid every token; allow more tokens, or lower min_tokens"
    )
