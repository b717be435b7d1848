"""Where a token stands: learned and rotary positions.

Legend: T packed tokens, S positions, E hidden size, H heads (query or key), D head dimension.
"""

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Embedding):
    """One trained vector a position, added to the token embedding (GPT-2, Radford et al. 2019)."""

    def __init__(self, max_context_length: int, hidden_size: int) -> None:
        super().__init__(max_context_length, hidden_size)


class RotaryPositions(nn.Module):
    """Rotary positions: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34.

    Pair i of a head's dimensions (i and i + D/2, the convention of Llama and its kin) is turned by the angle
    position * theta^(-2i/D), so that a query and a key meet at the difference of their positions.
    """

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, max_context_length: int, head_dim: int, theta: float) -> None:
        super().__init__()
        # float64: at position 100,000 a float32 angle would already be off by 0.004.
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_context_length, dtype=torch.float64), frequencies).repeat(1, 2)
        self.register_buffer("cos_SD", angles.cos().float(), persistent=False)
        self.register_buffer("sin_SD", angles.sin().float(), persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for these positions, each T1D float32, once a step for all layers."""
        return self.cos_SD[positions_T][:, None], self.sin_SD[positions_T][:, None]


def rotate(x_THD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn every head of every token by its angles; computed in float32, returned in the dtype given."""
    cos_T1D, sin_T1D = rotation
    first, second = x_THD.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_THD.float() * cos_T1D + turned * sin_T1D).to(x_THD.dtype)
