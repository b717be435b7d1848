"""The held-out loss: nats a token, and bits a byte, which can be compared across tokenizers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from model.attention.metadata import AttentionMetadata
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.transformer import Transformer

_TOKENS_PER_PASS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """What predicting some texts costs: -ln p of all of them, their predicted tokens, their UTF-8 bytes."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.num_tokens


@torch.inference_mode()
def evaluate(model: Transformer, tokenizer: ByteLevelTokenizer, texts: Sequence[str]) -> HeldOut:
    """The loss on texts, each followed by its end-of-text mark, which is predicted too.

    Every text is predicted from an end-of-text mark on, as in training; one longer than the context is cut into
    contexts, each of which begins anew with the token before it.

    Raises:
        ValueError: there are no texts.
    """
    if not texts:
        raise ValueError("no texts to evaluate")
    (end,) = tokenizer.eos_token_ids
    length = model.config.max_context_length
    windows: list[list[int]] = []
    for text in texts:
        ids = [end, *tokenizer.encode(text), end]
        windows += [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]
    nats = 0.0
    pending: list[list[int]] = []
    for window in windows:
        pending.append(window)
        if sum(map(len, pending)) >= _TOKENS_PER_PASS:
            nats += _nats(model, pending)
            pending = []
    if pending:
        nats += _nats(model, pending)
    return HeldOut(
        nats=nats,
        num_tokens=sum(len(window) - 1 for window in windows),
        num_bytes=sum(len(text.encode()) for text in texts),
    )


def _nats(model: Transformer, windows: list[list[int]]) -> float:
    """Negative log-likelihood of all but each window's first id."""
    device = model.token_embedding.weight.device
    inputs_T = torch.from_numpy(np.concatenate([window[:-1] for window in windows])).to(device)
    targets_T = torch.from_numpy(np.concatenate([window[1:] for window in windows])).to(device)
    metadata = AttentionMetadata.uncached(tuple(len(window) - 1 for window in windows), device)
    logits_TV = model(inputs_T, metadata, None)
    return float(functional.cross_entropy(logits_TV, targets_T, reduction="sum"))
