"""The log-likelihood of token ids under a model: the one definition behind every figure of training and evaluation.

A `Window` is a few ids that are given and the ids that are scored after them. A text longer than the context becomes
several, by `rolling_windows`.

Legend: T packed tokens, R rows whose target is scored, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from model.attention.metadata import AttentionMetadata
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.transformer import Transformer

# Of one forward pass. Logits are what takes the memory: 2**26 of them are 256 MiB.
_MAX_TOKENS = 8192
_MAX_LOGITS = 2**26
_ROWS_PER_SOFTMAX = 1024


@dataclass(frozen=True, slots=True)
class Window:
    """Ids that are given, at least one, and the ids that are scored, at least one."""

    given: Sequence[int]
    scored: Sequence[int]

    def __post_init__(self) -> None:
        if not self.given or not self.scored:
            raise ValueError("a window needs ids that are given and ids that are scored")

    @property
    def num_inputs(self) -> int:
        """Tokens the model reads: the last one is only predicted."""
        return len(self.given) + len(self.scored) - 1


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of the scored ids.

    log_likelihood: their total log-probability, in nats; never positive.
    num_greedy: how many of them were the model's likeliest next token.
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
    """Each window's score. Windows share forward passes, which changes a score only by its rounding.

    Raises:
        ValueError: a window is longer than the model's context.
    """
    longest = max((window.num_inputs for window in windows), default=0)
    if longest > model.config.max_context_length:
        raise ValueError(f"a window of {longest} tokens, the model's context is {model.config.max_context_length}")
    max_tokens = min(_MAX_TOKENS, _MAX_LOGITS // model.config.vocab_size)
    return [score for batch in _batches(windows, max_tokens) for score in _score(model, batch)]


def _batches(windows: Sequence[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Neighbours, as many as `max_tokens` allow; at least one."""
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
    """Each target's log-probability, float64 so that long sums stay exact, and whether it is the likeliest one."""
    log_probs, greedy = [], []
    for logits, targets in zip(logits_RV.split(_ROWS_PER_SOFTMAX), targets_R.split(_ROWS_PER_SOFTMAX), strict=True):
        log_probs.append(-functional.cross_entropy(logits, targets, reduction="none"))
        greedy.append(logits.argmax(dim=-1) == targets)
    return torch.cat(log_probs).double().cpu(), torch.cat(greedy).cpu()


def rolling_windows(token_ids: Sequence[int], begin: int, max_inputs: int) -> list[Window]:
    """The windows that score every id of a text once, none reading more than `max_inputs` tokens.

    The first is given `begin` alone; each later one the id before it, and the last one as much of what comes before as
    there is room for. These are the windows of lm-evaluation-harness (`get_rolling_token_windows`, context_len 1).

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
    """The id a text is predicted from: what begins a text, or else what ends one, as training joins texts by it.

    Raises:
        TokenizerError: the tokenizer has neither.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if not tokenizer.eos_token_ids:
        raise TokenizerError("no mark begins or ends a text: there is nothing to predict a first token from")
    return tokenizer.eos_token_ids[0]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """The id that ends a document in training: the mark that begins one where it ends them as well, else the first of
    those that end a text; None where nothing does."""
    if tokenizer.bos_token_id in tokenizer.eos_token_ids:
        return tokenizer.bos_token_id
    return next(iter(tokenizer.eos_token_ids), None)
