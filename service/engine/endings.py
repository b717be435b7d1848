"""When a token ends its sequence, and which tokens may not come next."""

from service.engine.sequence import Sequence
from service.messages import FinishReason


class Endings:
    """What the model's own ends of a text, and a request's, mean for a sequence. Changes none.

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

    def of(self, sequence: Sequence) -> tuple[FinishReason, int | None] | None:
        """Why the last token ends its sequence, and the stop token that it is, if any; None where it does not."""
        params, token_id = sequence.params, sequence.token_ids[-1]
        may_stop = sequence.num_completion_tokens > params.min_tokens
        if may_stop and token_id in self._eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP, None
        if may_stop and token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if len(sequence.token_ids) >= sequence.max_length:
            return FinishReason.LENGTH, None
        return None
