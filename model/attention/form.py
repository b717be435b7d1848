"""What one layer's attention is, beside its queries, keys and values.

Legend: B sequences, Q query tokens of a sequence, S its context, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ScoreBias(Protocol):
    """Something added to the scores that knows how far apart two tokens are. See `model.attention.biases`."""

    def __call__(self, q_BQHD: Tensor, k_BSKD: Tensor, distances_BQS: Tensor) -> Tensor:
        """BHQS, or 1HQS where it depends on nothing of the sequences, to add to the scaled scores.

        `distances_BQS` is int64, query position - key position; it may have B = 1 for all, and negative entries,
        which are masked and may be given any finite value.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """One layer's choices.

    layer: which, for the cache. scale: factor of q·k. window: positions a token sees, itself included; None for all.
    bias: added to the scaled scores, or None.
    """

    layer: int
    scale: float
    window: int | None
    bias: ScoreBias | None


def visible(distances: Tensor, window: int | None) -> Tensor:
    """Boolean mask: keys that are not in the future, nor behind the window. Any shape."""
    if window is None:
        return distances >= 0
    return (distances >= 0) & (distances < window)
