"""Training speed of a model on this machine, measured on random tokens."""

import statistics
import time

import torch
from torch import nn
from torch.nn import functional

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from model.training.config import TrainConfig
from model.training.optimizer import Optimizers

_STEPS = 3


def seconds_a_step(config: TrainConfig, *, device: str, precision: str, attention: str) -> float:
    """Return the median duration of three training steps, without torch.compile, after one warm-up step."""
    model = Transformer(config.model, ATTENTION_BACKENDS[attention])
    model.initialize(config.seed)
    model.to(device)
    optimizers = Optimizers(model, config)
    rows = AttentionMetadata.uncached((config.sequence_length,) * config.batch_size, device)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(config.vocab_size, (config.tokens_per_step + 1,), generator=generator).to(device)
    durations: list[float] = []
    for step in range(_STEPS + 1):
        began = time.monotonic()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            loss = functional.cross_entropy(model(tokens[:-1], rows, None), tokens[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizers.step(step)
        float(loss.detach())  # waits for the device
        durations.append(time.monotonic() - began)
    return statistics.median(durations[1:])
