"""Drafts of what may follow a sequence: what followed when its last tokens stood there before.

Summaries, edits and lists repeat their prompts and themselves, and a draft costs a look into a dictionary (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding). The model computes a draft's tokens in one pass and draws at each place
as it would have drawn there anyway, a function of seed and position; drafted tokens that were drawn save their passes,
and what was drawn in place of the first wrong one counts. So nothing but the number of passes changes, also where
draws are random: speculative decoding (Leviathan et al. 2023, arXiv 2211.17192) whose draws are fixed beforehand.
(Within float rounding, which depends on the shape of a batch, as everywhere in the engine.)
"""

from collections.abc import Sequence

# Longer runs of tokens say more surely what comes next: they are asked first.
_RUN_LENGTHS = (4, 2)
# Of a longer sequence only so many of its last tokens are looked through.
_WINDOW = 8192
# How much of what is known of earlier guesses stays at each one: about the last ten count.
_MEMORY = 0.9


class PromptLookup:
    """The drafts of one sequence, as long as they are likely to pay.

    What a lookup would have said is compared with every token that is drawn, drafted or not: that takes no computing by
    the model. So how often it is right is known where nothing is drafted, and no draft is made to find out.

    Args:
        max_tokens: of a draft.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_known = 0
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _RUN_LENGTHS)
        # Of the last guesses from runs of each length, and one that was half right before the first.
        self._num_right = [0.5 for _ in _RUN_LENGTHS]
        self._num_guesses = [1.0 for _ in _RUN_LENGTHS]

    def draft(self, token_ids: Sequence[int], limit: int, price: float = 0.0) -> tuple[int, ...]:
        """What may follow `token_ids`, at most `limit` tokens; often nothing. They only ever grow.

        A token is drafted if the chance that it and all before it are right is more than `price`.
        """
        self._learn(token_ids)
        for kind, run_length in enumerate(_RUN_LENGTHS):
            place = self._after[kind].get(tuple(token_ids[-run_length:]))
            if place is not None:
                return _continued(token_ids, place, self._worthwhile(kind, min(limit, self._max_tokens), price))
        return ()

    def _worthwhile(self, kind: int, most: int, price: float) -> int:
        """How many tokens to draft from a run of this kind."""
        chance = self._num_right[kind] / self._num_guesses[kind]
        length, all_right = 0, chance
        while length < most and all_right > price:
            length, all_right = length + 1, all_right * chance
        return length

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Know where every run of tokens ended last, but for the one at the end: nothing has followed it yet."""
        for place in range(max(self._num_known, len(token_ids) - _WINDOW, 1), len(token_ids)):
            is_guessed = not self._num_known  # the prompt is another's text: how it repeats itself says little
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
    """The tokens from `place` on; what repeats itself at the end goes on doing so."""
    period = len(token_ids) - place
    return tuple(token_ids[place + offset % period] for offset in range(length))
