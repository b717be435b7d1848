"""What is kept of an answer until its client takes it: how much that is, and how much it may be."""

from typing import Final

from service.messages import TokenDelta

# Of one stream. A client that is so far behind is given up.
MAX_BACKLOG_BYTES: Final = 16 * 2**20
# Roughly what Python keeps: of a delta, of a token's score, of each alternative beside it, of a character.
_DELTA_BYTES, _SCORE_BYTES, _ALTERNATIVE_BYTES, _CHARACTER_BYTES = 600, 150, 120, 4


def kept_bytes(delta: TokenDelta) -> int:
    """Memory that a delta takes, roughly. What comes with a prompt's scores is large, and counted whole."""
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
