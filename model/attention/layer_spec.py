"""Attention parameters of one layer: scale, window and bias.

Legend: B sequences, Q query tokens of a sequence, S its context, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ScoreBias(Protocol):
    """Position-dependent bias, added to the attention scores. See `model.attention.score_biases`."""

    def __call__(self, q_BQHD: Tensor, k_BSKD: Tensor, distances_BQS: Tensor) -> Tensor:
        """Return the bias BHQS to add to the scaled scores; 1HQS if the bias is equal for all sequences.

        `distances_BQS` is int64: query position - key position. Its B is 1 if all sequences have the same distances.
        Scores of negative distances are masked later, so any finite bias is allowed there.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """Attention parameters of one layer.

    Attributes:
        layer: the layer's index in the KV-cache.
        scale: factor of q·k.
        window: number of positions that a token sees, its own included; None: no limit.
        bias: added to the scaled scores; None: no bias.
    """

    layer: int
    scale: float
    window: int | None
    bias: ScoreBias | None


def visible(distances: Tensor, window: int | None) -> Tensor:
    """Return the boolean mask of keys that are neither in the future nor before the window. Any shape."""
    if window is None:
        return distances >= 0
    return (distances >= 0) & (distances < window)
