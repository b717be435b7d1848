"""Where a token stands, told before the scores: learned, sinusoidal and rotary positions.

Positions that act in the scores themselves are in `model.attention.biases`.

Legend: T packed tokens, S positions, E hidden size, H heads (query or key), D head dimension, R rotated dimensions.
"""

import math

import torch
from torch import Tensor, nn

from model.kinds import RopeScaling, RopeScalingKind


class LearnedPositions(nn.Embedding):
    """One trained vector a position, added to the token embedding (GPT-2, Radford et al. 2019)."""

    def __init__(self, max_context_length: int, hidden_size: int) -> None:
        super().__init__(max_context_length, hidden_size)


class SinusoidalPositions(nn.Module):
    """One fixed vector a position, added to the token embedding: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5.

    Component 2i is sin(position / 10000^(2i/E)), component 2i + 1 the cosine, so that the vector of position + k is a
    linear function of the vector of position, the same for all positions.
    """

    frequencies: Tensor

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.register_buffer("frequencies", _frequencies(hidden_size, 10000.0), persistent=False)

    def forward(self, positions_T: Tensor) -> Tensor:
        """TE float32."""
        angles = positions_T[:, None].float() * self.frequencies
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.hidden_size]


class RotaryPositions(nn.Module):
    """Rotary positions: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34.

    Pair i of the rotated dimensions (i and i + R/2, the convention of Llama and its kin) is turned by the angle
    position * theta^(-2i/R), so that a query and a key meet at the difference of their positions. The first R
    dimensions of a head are rotated, the others left as they are (partial rotary, GPT-NeoX).

    Angles are float32 products: less exact than float64 at position 100,000 (by 0.004), but what every model that
    uses them was trained with.
    """

    frequencies: Tensor

    def __init__(self, rotary_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        frequencies = scale_frequencies(_frequencies(rotary_dim, theta), scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for these positions, each T1R float32, once a step for all layers."""
        angles = (positions_T[:, None].float() * self.frequencies).repeat(1, 2)[:, None]
        return angles.cos(), angles.sin()


def _frequencies(size: int, theta: float) -> Tensor:
    """theta^(-2i/size) for i from 0 to size/2, float32.

    On the CPU even where the model is built without memory (the meta device): a constant is not loaded.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return 1.0 / theta**exponents


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Frequencies for contexts longer than a model was first trained for.

    linear: all divided by the factor, which is the same as positions divided by it (Chen et al. 2023, arXiv
    2306.15595). llama3: with r = original context / wavelength, those with r under `low_freq_factor` are divided by the
    factor, those over `high_freq_factor` kept, and a linear ramp in r leads from one to the other (Llama 3.1; the
    rule is that of "NTK by parts" in Peng et al. 2023, arXiv 2309.00071, section 3.2).
    """
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind is RopeScalingKind.LINEAR:
        return stretched
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context_length
    assert low is not None
    assert high is not None
    assert original is not None
    wavelengths = 2 * math.pi / frequencies
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * stretched + kept * frequencies


def rotate_each(q_THD: Tensor, k_TKD: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys, one after the other."""
    return rotate(q_THD, rotation), rotate(k_TKD, rotation)


def rotate(x_THD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first R dimensions of every head of every token; in float32, returned in the dtype given."""
    cos_T1R, sin_T1R = rotation
    size = cos_T1R.shape[-1]
    x_THR = x_THD[..., :size].float()
    first, second = x_THR.chunk(2, dim=-1)
    turned_THR = x_THR * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R
    if size < x_THD.shape[-1]:
        return torch.cat((turned_THR.to(x_THD.dtype), x_THD[..., size:]), dim=-1)
    return turned_THR.to(x_THD.dtype)
