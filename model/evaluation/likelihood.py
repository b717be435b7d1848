"""Log-likelihood of texts under a model: bits per byte, nats per token and top-1 accuracy.

Legend: T packed tokens, R rows with a scored target, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch.nn import functional

from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from model.tokenizer.interface import Tokenizer, TokenizerError

# Limits of one forward pass. Logits use most of the memory: 2**26 float32 logits are 256 MiB.
_MAX_TOKENS = 8192
_MAX_LOGITS = 2**26
_ROWS_PER_SOFTMAX = 1024


class Window(NamedTuple):
    """Consecutive token ids of a text: at least one id as context (given), then at least one id to predict (scored)."""

    given: Sequence[int]
    scored: Sequence[int]

    @property
    def num_inputs(self) -> int:
        """Number of token ids that the model reads: all but the last scored id, which is only predicted."""
        return len(self.given) + len(self.scored) - 1


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of predicted token ids, summed, in nats. num_greedy: how many were the model's most likely id."""

    log_likelihood: float
    num_tokens: int
    num_greedy: int

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.log_likelihood + other.log_likelihood,
            self.num_tokens + other.num_tokens,
            self.num_greedy + other.num_greedy,
        )


_ZERO = Score(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Score of each held-out text, in the order of the texts. num_bytes: total size of the texts in UTF-8."""

    documents: tuple[Score, ...]
    num_bytes: int

    @property
    def total(self) -> Score:
        return sum(self.documents, _ZERO)

    @property
    def bits_per_byte(self) -> float:
        return -self.total.log_likelihood / math.log(2) / self.num_bytes

    @property
    def nats_per_token(self) -> float:
        return -self.total.log_likelihood / self.total.num_tokens

    @property
    def accuracy(self) -> float:
        """Share of the predicted tokens that were the model's most likely token."""
        return self.total.num_greedy / self.total.num_tokens


@torch.inference_mode()
def score_windows(model: Transformer, windows: Sequence[Window]) -> list[Score]:
    """Return the score of each window's ids under the model. Several windows are computed in one forward pass.

    Sharing a pass changes a score only by rounding.

    Raises:
        ValueError: a window is longer than the model's context.
    """
    longest = max((window.num_inputs for window in windows), default=0)
    if longest > model.config.max_context_length:
        raise ValueError(
            f"a text window of {longest} tokens exceeds the model's context of {model.config.max_context_length}; "
            "give a shorter text"
        )
    max_tokens = min(_MAX_TOKENS, _MAX_LOGITS // model.config.vocab_size)
    return [score for batch in _batches(windows, max_tokens) for score in _score(model, batch)]


def _batches(windows: Sequence[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Yield batches of consecutive windows, at most `max_tokens` inputs in total; a longer window is a batch alone."""
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
    targets_R = torch.tensor(targets, device=device)
    log_probs, greedy = [], []
    for logits, chunk in zip(logits_RV.split(_ROWS_PER_SOFTMAX), targets_R.split(_ROWS_PER_SOFTMAX), strict=True):
        log_probs.append(-functional.cross_entropy(logits, chunk, reduction="none"))
        greedy.append(logits.argmax(dim=-1) == chunk)
    lengths = [len(window.scored) for window in windows]
    # Sums are float64, so that the log-likelihood of a long text stays accurate.
    parts = zip(torch.cat(log_probs).cpu().double().split(lengths), torch.cat(greedy).cpu().split(lengths), strict=True)
    return [Score(float(logs.sum()), len(logs), int(hits.sum())) for logs, hits in parts]


def rolling_windows(token_ids: Sequence[int], begin: int, max_inputs: int) -> list[Window]:
    """Cut a text into windows of at most `max_inputs` inputs, so that every id of the text is scored once.

    The given ids are `begin` for the first window, the preceding id for each later window, and for the last window as
    many preceding ids as fit. lm-evaluation-harness has the same windows (`get_rolling_token_windows`, context_len 1).
    """
    windows = []
    for start in range(0, len(token_ids), max_inputs):
        end = min(start + max_inputs, len(token_ids))
        given = token_ids[end - max_inputs - 1 : start] if start else [begin]
        windows.append(Window(given, token_ids[start:end]))
    return windows


def begin_of_text(tokenizer: Tokenizer) -> int:
    """Return the token id that precedes the first token of a text: BOS, else the first EOS token.

    Raises:
        TokenizerError: the tokenizer has neither a BOS nor an EOS token.
    """
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    if not tokenizer.eos_token_ids:
        raise TokenizerError(
            "the tokenizer has no BOS and no EOS token to predict the first token of a text from; define one"
        )
    return tokenizer.eos_token_ids[0]


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the token id that ends a document in training: BOS if it is an EOS token, else the first EOS token.

    Returns None if the tokenizer has no EOS token.
    """
    if tokenizer.bos_token_id in tokenizer.eos_token_ids:
        return tokenizer.bos_token_id
    return next(iter(tokenizer.eos_token_ids), None)


def evaluate(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, max_context_length: int | None = None
) -> HeldOut:
    """Score held-out texts as in training: `begin_of_text` comes before a text; `end_of_text`, if any, is scored too.

    max_context_length: maximum number of inputs of a window; None: the model's context length.

    Raises:
        ValueError: there are no texts, a window exceeds the model's context, or the tokenizer cannot encode a text.
    """
    if not texts:
        raise ValueError("no texts to evaluate; give at least one held-out text")
    end = end_of_text(tokenizer)
    ids = [[*tokenizer.encode(text), *([] if end is None else [end])] for text in texts]
    length = model.config.max_context_length if max_context_length is None else max_context_length
    scores = _score_texts(model, ids, begin_of_text(tokenizer), length)
    return HeldOut(tuple(scores), sum(len(text.encode(errors="replace")) for text in texts))


def rolling_log_likelihoods(
    model: Transformer, tokenizer: Tokenizer, texts: Sequence[str], *, max_length: int
) -> list[float]:
    """Return the log-likelihood of each text in nats, as lm-evaluation-harness computes `loglikelihood_rolling`.

    Unlike `evaluate`, the harness does not predict the EOS token. The harness's model type `local-completions` reserves
    two of the `max_length` tokens: one for the requested completion, and one that the harness counts twice.
    """
    ids = [tokenizer.encode(text) for text in texts]
    scores = _score_texts(model, ids, begin_of_text(tokenizer), max_length - 2)
    return [score.log_likelihood for score in scores]


def _score_texts(model: Transformer, texts: Sequence[Sequence[int]], begin: int, max_inputs: int) -> list[Score]:
    windows = [rolling_windows(ids, begin, max_inputs) for ids in texts]
    scores = iter(score_windows(model, [window for of_text in windows for window in of_text]))
    return [sum(islice(scores, len(of_text)), _ZERO) for of_text in windows]
