"""`best_of`: of each prompt's completions, those that are told."""

from collections.abc import Sequence

from service.dialects import Piece


def best(pieces: Sequence[Piece], num_told: int) -> list[Piece]:
    """The likeliest of each prompt's whole completions, likeliest first, prompt by prompt.

    By log-probability per token under the model itself, as OpenAI documents it. Of equals the first sample's.
    """
    by_prompt: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_prompt.setdefault(piece.choice.prompt_index, []).append(piece)
    ranked = (sorted(samples, key=_mean_logprob, reverse=True) for samples in by_prompt.values())
    return [piece for samples in ranked for piece in samples[:num_told]]


def _mean_logprob(piece: Piece) -> float:
    """0 for a completion of no tokens: it is certain."""
    total = sum(entry.logprob or 0.0 for entry in piece.logprobs)
    return total / len(piece.logprobs) if piece.logprobs else 0.0
