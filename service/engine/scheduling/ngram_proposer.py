"""Prompt-lookup drafts (n-gram speculative decoding): the tokens after the previous occurrence of the last n-gram.

Summaries, edits and lists repeat their prompts and themselves, and a draft costs one dictionary lookup (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding). The model computes all draft tokens in one forward pass. At each
position it samples the token that it would sample without drafts, because sampling is a function of seed and position.
Draft tokens equal to the sampled tokens are accepted and save forward passes. The token sampled instead of the first
rejected draft token counts too. So drafts change the number of passes but not the output, even with random sampling:
speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) with predetermined random numbers. As everywhere in the
engine, float rounding may depend on the shape of a batch.
"""

from collections.abc import Sequence

# Lengths of n-grams, looked up in this order: longer n-grams predict better.
_RUN_LENGTHS = (4, 2)
# Maximum number of last tokens indexed at once. Earlier tokens of a longer prompt are skipped.
_WINDOW = 8192
# Decay of the acceptance statistics at each prediction: about the last ten predictions count.
_MEMORY = 0.9


class PromptLookup:
    """Draft source of one sequence, with drafts as long as they are likely to pay.

    Each sampled token is compared with the lookup's prediction, even if nothing was drafted. This costs no model
    computation and measures the accuracy without trial drafts.

    Args:
        max_tokens: maximum length of a draft.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_known = 0
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _RUN_LENGTHS)
        # Recent predictions for each n-gram length. The prior is one prediction, half right.
        self._num_right = [0.5 for _ in _RUN_LENGTHS]
        self._num_guesses = [1.0 for _ in _RUN_LENGTHS]

    def draft(self, token_ids: Sequence[int], limit: int, price: float = 0.0) -> tuple[int, ...]:
        """Return a draft of at most `limit` tokens, often empty.

        A token is drafted if the probability that the whole draft up to this token is accepted exceeds `price`.

        Args:
            token_ids: all tokens of the sequence. Between calls, tokens may only be appended.
            limit: maximum number of tokens.
            price: minimum acceptance probability of a draft token.
        """
        self._learn(token_ids)
        for kind, run_length in enumerate(_RUN_LENGTHS):
            place = self._after[kind].get(tuple(token_ids[-run_length:]))
            if place is not None:
                return _continued(token_ids, place, self._worthwhile(kind, min(limit, self._max_tokens), price))
        return ()

    def _worthwhile(self, kind: int, most: int, price: float) -> int:
        """Return the number of tokens worth drafting after an n-gram of this kind."""
        chance = self._num_right[kind] / self._num_guesses[kind]
        length, all_right = 0, chance
        while length < most and all_right > price:
            length, all_right = length + 1, all_right * chance
        return length

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Index new n-grams by the position after them, except the last n-gram, and update the statistics."""
        for place in range(max(self._num_known, len(token_ids) - _WINDOW, 1), len(token_ids)):
            is_guessed = not self._num_known  # the prompt is not model output: its repetitions predict little
            for kind, (run_length, after) in enumerate(zip(_RUN_LENGTHS, self._after, strict=True)):
                if place < run_length:
                    continue
                run = tuple(token_ids[place - run_length : place])
                earlier = after.get(run)
                if earlier is not None and not is_guessed:
                    is_guessed = True
                    self._num_guesses[kind] = self._num_guesses[kind] * _MEMORY + 1
                    self._num_right[kind] *= _MEMORY
                    self._num_right[kind] += token_ids[earlier] == token_ids[place]
                after[run] = place
        self._num_known = len(token_ids)


def _continued(token_ids: Sequence[int], place: int, length: int) -> tuple[int, ...]:
    """Return `length` tokens from `place` on. A repetition that reaches the end of the tokens continues."""
    period = len(token_ids) - place
    return tuple(token_ids[place + offset % period] for offset in range(length))
