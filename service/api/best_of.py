"""`best_of`: selection of the completions that are returned for each prompt."""

from collections.abc import Sequence

from service.api.response_builder import TokenPiece


def best(pieces: Sequence[TokenPiece], num_returned: int) -> list[TokenPiece]:
    """Return the `num_returned` most likely completions of each prompt, most likely first, prompt by prompt.

    Completions are ranked by mean logprob per token, as OpenAI documents it. Ties go to the earlier sample.
    """
    by_prompt: dict[int, list[TokenPiece]] = {}
    for piece in pieces:
        by_prompt.setdefault(piece.choice.prompt_index, []).append(piece)
    ranked = (sorted(samples, key=_mean_logprob, reverse=True) for samples in by_prompt.values())
    return [piece for samples in ranked for piece in samples[:num_returned]]


def _mean_logprob(piece: TokenPiece) -> float:
    """Return the mean logprob of a completion's tokens; 0 for a completion without tokens."""
    total = sum(entry.logprob or 0.0 for entry in piece.logprobs)
    return total / len(piece.logprobs) if piece.logprobs else 0.0
