"""Stop conditions of sequences, and the tokens forbidden next."""

from collections.abc import Sequence as Ordered

from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import Chunk
from service.ipc.messages import FinishReason


class StopConditions:
    """Appends sampled tokens to sequences and checks stop conditions. Only the scheduler calls it.

    Args:
        eos_token_ids: end-of-sequence tokens of the model.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def forbidden(self, sequence: SequenceState) -> tuple[int, ...]:
        """Return the tokens forbidden next: stop tokens before `min_tokens`, and tokens that complete a bad word."""
        params = sequence.params
        words = () if sequence.rules is None else sequence.rules.forbidden
        if sequence.num_completion_tokens >= params.min_tokens:
            return words
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_token_ids)
        return (*ends, *words)

    def append(self, chunk: Chunk, token_ids: Ordered[int | None], now: float) -> bool:
        """Append the sampled tokens of a chunk up to its first rejected draft token. Return True if the sequence ends.

        An ended sequence has its `finish_reason` set.

        token_ids: tokens sampled after the sequence and after each draft token; None if no token may follow.
        now: time of sampling, in seconds.
        """
        sequence = chunk.sequence
        ends = self._append(sequence, token_ids[0], now)
        if not chunk.draft:
            return ends
        for guessed, before, token_id in zip(chunk.draft, token_ids, token_ids[1:], strict=False):
            if ends or guessed != before:
                break
            sequence.num_computed_tokens += 1
            ends = self._append(sequence, token_id, now)
        return ends

    def _append(self, sequence: SequenceState, token_id: int | None, now: float) -> bool:
        if token_id is None:
            sequence.finish_reason = FinishReason.REFUSED
            return True
        sequence.token_ids.append(token_id)
        if sequence.rules is not None:
            sequence.rules.append(token_id)
        sequence.last_token_seconds = now
        if sequence.first_token_seconds is None:
            sequence.first_token_seconds = now
        return self.ends(sequence)

    def ends(self, sequence: SequenceState) -> bool:
        """Return True if the last token ends the sequence, and set its finish reason and stop token."""
        params, token_id, length = sequence.params, sequence.token_ids[-1], len(sequence.token_ids)
        reason, stop_token_id = None, None
        if length - sequence.num_prompt_tokens > params.min_tokens:
            if token_id in self._eos_token_ids and not params.ignore_eos:
                reason = FinishReason.STOP
            elif token_id in params.stop_token_ids:
                reason, stop_token_id = FinishReason.STOP, token_id
        if reason is None and length >= sequence.max_length:
            reason = FinishReason.LENGTH
        if reason is None:
            return False
        sequence.finish_reason, sequence.stop_reason = reason, stop_token_id
        return True
