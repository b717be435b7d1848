"""Log-likelihood of texts under a model: bits per byte, nats per token and top-1 accuracy.

A `Window` has given ids and, after them, ids to score. `rolling_windows` cuts a text longer than the context into
several windows.

Legend: T packed tokens, R rows with a scored target, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional

from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer, TokenizerError

# Limits of one forward pass. Logits use most of the memory: 2**26 float32 logits are 256 MiB.
_MAX_TOKENS = 8192
_MAX_LOGITS = 2**26
_ROWS_PER_SOFTMAX = 1024


@dataclass(frozen=True, slots=True)
class Window:
    """At least one given id, followed by at least one id to score."""

    given: Sequence[int]
    scored: Sequence[int]

    def __post_init__(self) -> None:
        if not self.given or not self.scored:
            raise ValueError("a window needs at least one given id and one id to score")

    @property
    def num_inputs(self) -> int:
        """Number of tokens that the model reads. The last scored token is only predicted."""
        return len(self.given) + len(self.scored) - 1


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a sequence of ids.

    log_likelihood: total log-probability of the ids in nats, at most 0.
    num_tokens: number of scored ids.
    num_greedy: number of ids that were the model's most likely next token.
    """

    log_likelihood: float
    num_tokens: int
    num_greedy: int


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


@torch.inference_mode()
def score_windows(model: Transformer, windows: Sequence[Window]) -> list[Score]:
    """Return the score of each window. Windows share forward passes, which changes a score only by rounding.

    Raises:
        ValueError: a window is longer than the model's context.
    """
    longest = max((window.num_inputs for window in windows), default=0)
    if longest > model.config.max_context_length:
        raise ValueError(
            f"a window of {longest} tokens exceeds the model's context of {model.config.max_context_length}"
        )
    max_tokens = min(_MAX_TOKENS, _MAX_LOGITS // model.config.vocab_size)
    return [score for batch in _batches(windows, max_tokens) for score in _score(model, batch)]


def _batches(windows: Sequence[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Yield batches of consecutive windows of at most `max_tokens` inputs; a longer window is a batch alone."""
    batch: list[Window] = []
    num_tokens = 0
    for window in windows:
        if batch and num_tokens + window.num_inputs > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(window)
        num_tokens += window.num_inputs
    if batch:
        yield batch


def _score(model: Transformer, windows: Sequence[Window]) -> list[Score]:
    device = model.token_embedding.weight.device
    inputs: list[int] = []
    rows: list[int] = []
    for window in windows:
        rows += range(len(inputs) + len(window.given) - 1, len(inputs) + window.num_inputs)
        inputs += [*window.given, *window.scored[:-1]]
    targets = [token_id for window in windows for token_id in window.scored]
    metadata = AttentionMetadata.uncached(tuple(window.num_inputs for window in windows), device)
    if len(rows) < len(inputs):
        metadata = dataclasses.replace(metadata, logit_rows_R=torch.tensor(rows, device=device))
    logits_RV = model(torch.tensor(inputs, device=device), metadata, None)
    log_probs_R, greedy_R = _of_targets(logits_RV, torch.tensor(targets, device=device))
    lengths = [len(window.scored) for window in windows]
    parts = zip(log_probs_R.split(lengths), greedy_R.split(lengths), strict=True)
    return [Score(float(log_probs.sum()), len(log_probs), int(greedy.sum())) for log_probs, greedy in parts]


def _of_targets(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability, and True for each target that is the most likely token.

    The log-probabilities are float64, so that long sums stay accurate.
    """
    log_probs, greedy = [], []
    for logits, targets in zip(logits_RV.split(_ROWS_PER_SOFTMAX), targets_R.split(_ROWS_PER_SOFTMAX), strict=True):
        log_probs.append(-functional.cross_entropy(logits, targets, reduction="none"))
        greedy.append(logits.argmax(dim=-1) == targets)
    return torch.cat(log_probs).double().cpu(), torch.cat(greedy).cpu()


def rolling_windows(token_ids: Sequence[int], begin: int, max_inputs: int) -> list[Window]:
    """Return windows that score every id of a text once, with at most `max_inputs` input tokens each.

    The given ids of the first window are `begin` alone. Each later window is given the id before it. The last window is
    given as many preceding ids as fit. These are the windows of lm-evaluation-harness (`get_rolling_token_windows`,
    context_len 1).

    Raises:
        ValueError: `max_inputs` is not positive.
    """
    if max_inputs < 1:
        raise ValueError(f"the window of context must have at least one token, not {max_inputs}")
    windows = []
    for start in range(0, len(token_ids), max_inputs):
        end = min(start + max_inputs, len(token_ids))
        given = token_ids[end - max_inputs - 1 : start] if start else [begin]
        windows.append(Window(given, token_ids[start:end]))
    return windows


def begin_of_text(tokenizer: Tokenizer) -> int:
    """Return the id that the first token of a text is predicted from: BOS, or else the first EOS token.

    The EOS token can stand in for BOS because training joins texts by it.

    Raises:
        TokenizerError: the tokenizer has neither a BOS nor an EOS token.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if not tokenizer.eos_token_ids:
        raise TokenizerError("the tokenizer has no BOS and no EOS token to predict a first token from; define one")
    return tokenizer.eos_token_ids[0]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a document in training: BOS if it is also an EOS token, else the first EOS token.

    None if the tokenizer has no EOS token.
    """
    if tokenizer.bos_token_id in tokenizer.eos_token_ids:
        return tokenizer.bos_token_id
    return next(iter(tokenizer.eos_token_ids), None)


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
    total = _total(scores)
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
    return [_total(list(islice(scores, len(of_text)))) for of_text in windows]


def _total(scores: Sequence[Score]) -> Score:
    return Score(
        sum(score.log_likelihood for score in scores),
        sum(score.num_tokens for score in scores),
        sum(score.num_greedy for score in scores),
    )
