"""Speculative decoding with prompt lookup: draft tokens follow an earlier occurrence of a sequence's last n-gram.

A draft costs one dictionary lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). It saves time if the
output repeats the prompt or itself. One forward pass computes all draft tokens. At each position the model samples
the token that it would sample without a draft, because sampling is a function of seed and position. So draft tokens
equal to the sampled tokens save forward passes, and the output never changes: speculative decoding (Leviathan et al.
2023, arXiv 2211.17192) with predetermined random numbers.
"""

from collections.abc import Sequence

# Lengths of n-grams, looked up in this order: longer n-grams predict better.
_NGRAM_LENGTHS = (4, 2)
# Maximum number of last tokens indexed at once. Earlier tokens of a longer prompt are skipped.
_WINDOW = 8192
# Decay of the acceptance statistics at each prediction: about the last ten predictions count.
_MEMORY = 0.9
# Minimum ratio of a draft token's acceptance probability to its cost: drafts that would barely pay are skipped.
_MARGIN = 1.5
# Divisor: drafts get a quarter of the token budget that decodes leave, prefills the rest.
_BUDGET_DIVISOR = 4
# Prior of the fixed time of a step, as a number of rows that would take as long, and the prior's weight against the
# observed spread of row counts, in steps times rows squared.
_PRIOR_ROWS, _PRIOR_WEIGHT = 16, 64
# Decay of the step times at each step: about the last 1,000 steps count.
_STEP_MEMORY = 0.999
# Cap on an observed duration, as a multiple of the mean: longer steps are stalls of the machine.
_OUTLIER = 3.0
_LEAST_COST, _MOST_COST = 0.05, 1.0


class PromptLookup:
    """Prompt-lookup drafts of one sequence.

    Each sampled token is compared with the token that the lookup predicts, even if no token was drafted. This measures
    the lookup's accuracy without computing draft tokens.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_known = 0
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _NGRAM_LENGTHS)
        # Recent predictions for each n-gram length. The prior is one prediction, half right.
        self._num_right = [0.5 for _ in _NGRAM_LENGTHS]
        self._num_predictions = [1.0 for _ in _NGRAM_LENGTHS]

    def draft(self, token_ids: Sequence[int], limit: int, min_probability: float = 0.0) -> tuple[int, ...]:
        """Return at most `limit` draft tokens, often none. Between calls, tokens may only be appended to `token_ids`.

        A token is drafted if its estimated acceptance probability, as a product with the probabilities of the draft
        tokens before it, exceeds `min_probability`.
        """
        self._learn(token_ids)
        for index, ngram_length in enumerate(_NGRAM_LENGTHS):
            position = self._after[index].get(tuple(token_ids[-ngram_length:]))
            if position is not None:
                length = self._worthwhile(index, min(limit, self._max_tokens), min_probability)
                period = len(token_ids) - position  # beyond the end of the tokens, the draft repeats itself
                return tuple(token_ids[position + offset % period] for offset in range(length))
        return ()

    def _worthwhile(self, index: int, most: int, min_probability: float) -> int:
        """Return how many tokens to draft: at most `most`, while P(all are accepted) is over `min_probability`."""
        probability = self._num_right[index] / self._num_predictions[index]
        length, all_accepted = 0, probability
        while length < most and all_accepted > min_probability:
            length, all_accepted = length + 1, all_accepted * probability
        return length

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams before each token that is new since the last call, and measure the lookup's accuracy."""
        for position in range(max(self._num_known, len(token_ids) - _WINDOW, 1), len(token_ids)):
            is_predicted = not self._num_known  # the prompt is not model output: its repetitions predict little
            for index, (ngram_length, after) in enumerate(zip(_NGRAM_LENGTHS, self._after, strict=True)):
                if position < ngram_length:
                    continue
                ngram = tuple(token_ids[position - ngram_length : position])
                earlier = after.get(ngram)
                if earlier is not None and not is_predicted:
                    is_predicted = True
                    self._num_predictions[index] = self._num_predictions[index] * _MEMORY + 1
                    self._num_right[index] *= _MEMORY
                    self._num_right[index] += token_ids[earlier] == token_ids[position]
                after[ngram] = position
        self._num_known = len(token_ids)


class DraftPolicy:
    """Limits on the draft tokens of a step, by the measured cost of one more token: drafts must raise throughput.

    Let n sequences sample one token each in t seconds, and let a draft token add b seconds, and one token with
    probability p. Throughput rises if (n + p) / (t + b) > n / t, that is, if p > n * b / t. The estimate of b is the
    slope of a least-squares line through the durations of recent steps over their numbers of tokens. If all recent
    steps have the same number of tokens, the slope of the prior dominates.
    """

    def __init__(self, max_batched_tokens: int) -> None:
        self._max_batched_tokens = max_batched_tokens
        self._num_steps = 0.0  # sum of weights, with the same decay as the other sums
        self._rows = self._seconds = self._rows_squared = self._rows_seconds = 0.0

    def limits(self, num_running: int) -> tuple[int, float]:
        """Return the maximum number of draft tokens of all sequences of a step, and their minimum probability."""
        return (self._max_batched_tokens - num_running) // _BUDGET_DIVISOR, _MARGIN * self.marginal_cost(num_running)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a step of `num_rows` tokens without prefills, which would distort a token's cost."""
        if self._seconds:
            seconds = min(seconds, _OUTLIER * self._seconds / self._num_steps)
        self._num_steps = self._num_steps * _STEP_MEMORY + 1
        self._rows = self._rows * _STEP_MEMORY + num_rows
        self._seconds = self._seconds * _STEP_MEMORY + seconds
        self._rows_squared = self._rows_squared * _STEP_MEMORY + num_rows**2
        self._rows_seconds = self._rows_seconds * _STEP_MEMORY + num_rows * seconds

    def marginal_cost(self, num_rows: int) -> float:
        """Return the time of one more token in a step of `num_rows` tokens, relative to the step's time per token."""
        if not self._seconds:
            return num_rows / (num_rows + _PRIOR_ROWS)
        mean_rows, mean_seconds = self._rows / self._num_steps, self._seconds / self._num_steps
        spread = self._rows_squared - self._rows * mean_rows
        usual = mean_seconds / (mean_rows + _PRIOR_ROWS)
        slope = (self._rows_seconds - self._rows * mean_seconds + _PRIOR_WEIGHT * usual) / (spread + _PRIOR_WEIGHT)
        whole = mean_seconds + slope * (num_rows - mean_rows)
        return min(_MOST_COST, max(_LEAST_COST, slope * num_rows / whole)) if whole > 0 else _MOST_COST
