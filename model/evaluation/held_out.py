"""Metrics on held-out texts: bits per byte (comparable across tokenizers), nats per token, top-1 accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from model.evaluation.likelihood import Score, begin_of_text, end_of_text, rolling_windows, score_windows
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """Log-likelihood and accuracy over a set of texts.

    nats: -ln p of all texts together.
    num_tokens: predicted tokens.
    num_bytes: UTF-8 bytes of the texts.
    num_greedy: predicted tokens that were the model's most likely token.
    documents: log-likelihood of each text in nats, in order; their sum is -nats.
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
        """Share of the predicted tokens that were the model's most likely token."""
        return self.num_greedy / self.num_tokens


def evaluate(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, max_context_length: int | None = None
) -> HeldOut:
    """Measure held-out texts as training does.

    Each text is predicted from the id of `begin_of_text`. The id of `end_of_text`, if there is one, is predicted too.
    A text longer than the context is cut by `rolling_windows`.

    Args:
        max_context_length: maximum number of tokens in a window; None: the model's context length.

    Raises:
        ValueError: there are no texts.
        TokenizerError: the tokenizer has no BOS and no EOS token, or cannot encode a text.
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
    """Return each text's `loglikelihood_rolling` as lm-evaluation-harness computes it with `local-completions`.

    The harness differs from `evaluate` in two points. It does not predict the EOS token. It reserves two of the
    `max_length` tokens: one for the completion that it requests from the server, and one that it counts twice. So a
    text of over `max_length` - 2 tokens is cut into other windows.

    Args:
        max_length: the harness's `max_length`.

    Raises:
        ValueError: `max_length` is below 3, which leaves no token to predict.
    """
    ids = [tokenizer.encode(text) for text in texts]
    scores = _score_texts(model, ids, begin_of_text(tokenizer), max_length - 2)
    return [score.log_likelihood for score in scores]


def _score_texts(model: Transformer, texts: Sequence[Sequence[int]], begin: int, max_inputs: int) -> list[Score]:
    """Return the score of each text, summed over its windows."""
    windows = [rolling_windows(ids, begin, max_inputs) for ids in texts]
    scores = iter(score_windows(model, [window for of_text in windows for window in of_text]))
    return [reduce(add, (next(scores) for _ in of_text), Score()) for of_text in windows]
