"""When a token ends its sequence, and which tokens may not come next."""

from collections.abc import Sequence as Ordered

from service.engine.plan import Chunk
from service.engine.sequence import Sequence
from service.messages import FinishReason


class Endings:
    """What drawn tokens mean for a sequence: its growth, and its end by the model's own ends of a text or a request's.

    The scheduler alone lets it change one.

    Args:
        eos_token_ids: what ends a text, any of them.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def forbidden(self, sequence: Sequence) -> tuple[int, ...]:
        """What the next draw must avoid: what would end the sequence before `min_tokens`, or complete a bad word."""
        params = sequence.params
        words = () if sequence.rules is None else sequence.rules.forbidden
        if sequence.num_completion_tokens >= params.min_tokens:
            return words
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_token_ids)
        return (*ends, *words)

    def take(self, chunk: Chunk, token_ids: Ordered[int | None], now: float) -> bool:
        """Add what was drawn for a sequence, up to where its draft was wrong. Returns whether it ends, knowing why.

        token_ids: drawn at `now`, after the sequence and after each token of the draft; None where none may come next.
        """
        sequence = chunk.sequence
        ends = self._take(sequence, token_ids[0], now)
        if not chunk.draft:
            return ends
        for guessed, before, token_id in zip(chunk.draft, token_ids, token_ids[1:], strict=False):
            if ends or guessed != before:
                break
            sequence.num_computed_tokens += 1
            ends = self._take(sequence, token_id, now)
        return ends

    def _take(self, sequence: Sequence, token_id: int | None, now: float) -> bool:
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

    def ends(self, sequence: Sequence) -> bool:
        """Whether its last token ends a sequence; it then knows why, and by which stop token, if by one."""
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
