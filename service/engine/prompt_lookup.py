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
_FIRST_DRAFT = 4
_LONGEST_PAUSE = 64


class PromptLookup:
    """The drafts of one sequence. They get shorter, and then pause, where they have been wrong.

    Args:
        max_tokens: of a draft.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._length = min(_FIRST_DRAFT, max_tokens)
        self._pause = 0  # doubles with each draft of which nothing was right
        self._silent_until = 0  # tokens of the sequence
        self._num_known = 0
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _RUN_LENGTHS)

    def draft(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """What may follow `token_ids`, at most `limit` tokens; often nothing. They only ever grow."""
        length = min(self._length, limit)
        if length <= 0 or len(token_ids) < self._silent_until:
            return ()
        self._learn(token_ids)
        for run_length, after in zip(_RUN_LENGTHS, self._after, strict=True):
            place = after.get(tuple(token_ids[-run_length:]))
            if place is not None:
                return _continued(token_ids, place, length)
        return ()

    def judge(self, num_tokens: int, num_drafted: int, num_right: int) -> None:
        """What became of a draft in a sequence that has `num_tokens` now."""
        if num_right:
            self._pause = 0
            self._length = min(self._max_tokens, 2 * num_right + 1)
        elif num_drafted:
            self._pause = min(_LONGEST_PAUSE, max(1, 2 * self._pause))
            self._silent_until = num_tokens + self._pause
            self._length = min(_FIRST_DRAFT, self._max_tokens)

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Know where every run of tokens ended last, but for the one at the end: nothing has followed it yet."""
        for place in range(max(self._num_known, len(token_ids) - _WINDOW, 1), len(token_ids)):
            for run_length, after in zip(_RUN_LENGTHS, self._after, strict=True):
                if place >= run_length:
                    after[tuple(token_ids[place - run_length : place])] = place
        self._num_known = len(token_ids)


def _continued(token_ids: Sequence[int], place: int, length: int) -> tuple[int, ...]:
    """The tokens from `place` on; what repeats itself at the end goes on doing so."""
    period = len(token_ids) - place
    return tuple(token_ids[place + offset % period] for offset in range(length))
