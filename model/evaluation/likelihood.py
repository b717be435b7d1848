"""Log-likelihood of token ids under a model, the basis of every metric of training and evaluation.

A `Window` has given ids and, after them, ids to score. `rolling_windows` cuts a text longer than the context into
several windows.

Legend: T packed tokens, R rows with a scored target, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

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

    log_likelihood: float = 0.0
    num_tokens: int = 0
    num_greedy: int = 0

    def __add__(self, other: Self) -> "Score":
        return Score(
            self.log_likelihood + other.log_likelihood,
            self.num_tokens + other.num_tokens,
            self.num_greedy + other.num_greedy,
        )


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
        raise ValueError(f"a window must read at least one token, not {max_inputs}")
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
