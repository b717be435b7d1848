"""Attention responses of the stub server: invented weights in the service's format."""

import math
from typing import Any

NUM_LAYERS, NUM_HEADS = 3, 4


def limits(model: str) -> dict[str, Any]:
    """Return the body of `GET /inspect/attention`."""
    return {"model": model, "num_layers": NUM_LAYERS, "num_heads": NUM_HEADS, "max_tokens": 128}


def answer(model: str, tokens: list[str], layer: int) -> dict[str, Any]:
    """Return the body of `POST /inspect/attention` for all heads: head h of layer l attends about h + l tokens back."""
    return {
        "object": "attention",
        "model": model,
        "layer": layer,
        "heads": list(range(NUM_HEADS)),
        "num_layers": NUM_LAYERS,
        "num_heads": NUM_HEADS,
        "token_ids": list(range(len(tokens))),
        "tokens": tokens,
        "weights": [[_row(t, len(tokens), layer + head) for t in range(len(tokens))] for head in range(NUM_HEADS)],
        "timings": {"total_ms": 3.2, "compute_ms": 1.25},
    }


def _row(t: int, num_tokens: int, back: int) -> list[float]:
    scores = [math.exp(-abs(t - s - back)) for s in range(t + 1)]
    return [score / sum(scores) for score in scores] + [0.0] * (num_tokens - t - 1)
