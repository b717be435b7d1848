"""Held-out texts: bits a byte, which can be compared across tokenizers, nats a token, top-1 accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from model.evaluation.likelihood import Score, begin_of_text, end_of_text, rolling_windows, score_windows
from model.tokenizer.interface import Tokenizer
from model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """What predicting some texts costs: -ln p of all of them, their predicted tokens, their UTF-8 bytes.

    num_greedy: predicted tokens that were the model's likeliest.
    documents: each text's log-likelihood in nats, in order; their sum is -nats.
    """

    nats: float
    num_tokens: int
    num_bytes: int
    num_greedy: int
    documents: tuple[float, ...]

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.num_tokens

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the likeliest one."""
        return self.num_greedy / self.num_tokens


def evaluate(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, max_context_length: int | None = None
) -> HeldOut:
    """The measure of training: each text is predicted from the mark that begins one, and the mark that ends it, where
    the tokenizer has one, is predicted too. One longer than the context is cut, see `rolling_windows`.

    Args:
        max_context_length: tokens the model reads at once; None for as many as it has positions.

    Raises:
        ValueError: there are no texts.
        TokenizerError: no mark begins a text.
    """
    if not texts:
        raise ValueError("no texts to evaluate")
    end = end_of_text(tokenizer)
    ids = [[*tokenizer.encode(text), *([] if end is None else [end])] for text in texts]
    length = model.config.max_context_length if max_context_length is None else max_context_length
    scores = _score_texts(model, ids, begin_of_text(tokenizer), length)
    total = reduce(add, scores, Score())
    return HeldOut(
        nats=-total.log_likelihood,
        num_tokens=total.num_tokens,
        num_bytes=sum(len(text.encode(errors="replace")) for text in texts),
        num_greedy=total.num_greedy,
        documents=tuple(score.log_likelihood for score in scores),
    )


def rolling_log_likelihoods(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int
) -> list[float]:
    """Each text's `loglikelihood_rolling` as lm-evaluation-harness gets it by `local-completions` and `max_length`.

    It leaves out the mark that ends a text. And it keeps two of the `max_length` tokens back: one for the completion
    that it asks the server for, one that it counts twice; so a text of over `max_length` - 2 tokens is cut otherwise
    than in `evaluate`.

    Raises:
        ValueError: `max_length` leaves no token to predict.
    """
    ids = [tokenizer.encode(text) for text in texts]
    scores = _score_texts(model, ids, begin_of_text(tokenizer), max_length - 2)
    return [score.log_likelihood for score in scores]


def _score_texts(model: Transformer, texts: Sequence[Sequence[int]], begin: int, max_inputs: int) -> list[Score]:
    """Each text's score, over all its windows."""
    windows = [rolling_windows(ids, begin, max_inputs) for ids in texts]
    scores = iter(score_windows(model, [window for of_text in windows for window in of_text]))
    return [reduce(add, (next(scores) for _ in of_text), Score()) for of_text in windows]
