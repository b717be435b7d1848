"""Memory of a response's deltas that its client has not yet read, and the limit on it."""

from typing import Final

from service.ipc.messages import TokenDelta

# Limit per stream. The request of a client that is further behind fails.
MAX_BACKLOG_BYTES: Final = 16 * 2**20
# Approximate Python memory of a delta, of a token's logprob entry, of each alternative in the entry, of a character.
_DELTA_BYTES, _SCORE_BYTES, _ALTERNATIVE_BYTES, _CHARACTER_BYTES = 600, 150, 120, 4


def delta_bytes(delta: TokenDelta) -> int:
    """Return the approximate memory of a delta in bytes, including its logprobs."""
    if not (delta.logprobs or delta.prompt_logprobs):
        return _DELTA_BYTES + _CHARACTER_BYTES * len(delta.text)
    scores = (*(delta.logprobs or ()), *(delta.prompt_logprobs or ()))
    num_alternatives = sum(len(score.top) for score in scores)
    return (
        _DELTA_BYTES
        + _CHARACTER_BYTES * len(delta.text)
        + _SCORE_BYTES * len(scores)
        + _ALTERNATIVE_BYTES * num_alternatives
    )
