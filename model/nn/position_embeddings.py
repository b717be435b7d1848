"""Position embeddings: sinusoidal vectors added to token embeddings, and rotary rotation of queries and keys.

Legend: T packed tokens, S positions, E hidden size, H heads (query or key), D head dimension, R rotated dimensions.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.config_enums import RopeScaling, RopeScalingKind


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions: a fixed vector per position, added to the token embedding.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.5. Component 2i is sin(position / 10000^(2i/E)), component 2i + 1
    the cosine.
    """

    frequencies: Tensor

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.register_buffer("frequencies", _frequencies(hidden_size, 10000.0), persistent=False)

    def forward(self, positions_T: Tensor) -> Tensor:
        """Return the sinusoidal vector of each position: float32, (positions, hidden size)."""
        angles = positions_T[:, None].float() * self.frequencies
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.hidden_size]


class RotaryPositions(nn.Module):
    """Rotary positions: Su et al. 2021, RoFormer (arXiv 2104.09864), equation 34.

    Pair i of the rotated dimensions (i and i + R/2, as in Llama) is rotated by the angle position * theta^(-2i/R). The
    first R dimensions of a head are rotated, the other dimensions are unchanged (partial rotary, GPT-NeoX). Angles are
    float32 products, as in training. The frequencies of LongRoPE depend on `max_context_length`.
    """

    frequencies: Tensor

    def __init__(
        self, rotary_dim: int, theta: float, scaling: RopeScaling | None, *, max_context_length: int = 0
    ) -> None:
        super().__init__()
        divisors = None if scaling is None else scaling.divisors(max_context_length)
        frequencies = scale_frequencies(_frequencies(rotary_dim, theta, divisors), scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.factor = 1.0 if scaling is None else scaling.rotation_factor

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of each position's rotation angles: two float32 tensors (positions, 1, R).

        LongRoPE multiplies both by a factor.
        """
        angles = (positions_T[:, None].float() * self.frequencies).repeat(1, 2)[:, None]
        if self.factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.factor, angles.sin() * self.factor


def _frequencies(size: int, theta: float, divisors: Sequence[float] | None = None) -> Tensor:
    """Return the frequencies theta^(-j/size) of all even j from 0 to size - 1, each divided by its divisor; float32."""
    # On the CPU even if the model is built on the meta device: constants are not loaded from the checkpoint.
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    wavelengths = theta**exponents
    return 1.0 / (wavelengths if divisors is None else torch.tensor(divisors, device="cpu") * wavelengths)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Return the frequencies of rotary positions, scaled for contexts longer than a model was first trained for.

    linear: all frequencies are divided by the factor (Chen et al. 2023, arXiv 2306.15595).
    llama3: let r = original context / wavelength. Frequencies with r under `low_freq_factor` are divided by the factor,
    frequencies with r over `high_freq_factor` are unchanged, with a linear ramp in r between: "NTK by parts" of Peng et
    al. 2023 (arXiv 2309.00071), section 3.2.
    longrope: `RopeScaling.divisors` has scaled them already.
    proportional: all frequencies are divided by the factor, and those after the first `rotated_fraction` are set to 0.
    """
    if scaling is None or scaling.kind is RopeScalingKind.LONGROPE:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind is RopeScalingKind.PROPORTIONAL:
        assert scaling.rotated_fraction is not None
        stretched[int(scaling.rotated_fraction * len(frequencies)) :] = 0
        return stretched
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
    """Rotate queries and keys by their tokens' rotation angles, given as cosines and sines."""
    return rotate(q_THD, rotation), rotate(k_TKD, rotation)


def rotate(x_THD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R dimensions of each head of each token by the token's angles. Computes in float32."""
    cos_T1R, sin_T1R = rotation
    size = cos_T1R.shape[-1]
    x_THR = x_THD[..., :size].float()
    first, second = x_THR.chunk(2, dim=-1)
    turned_THR = x_THR * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R
    if size < x_THD.shape[-1]:
        return torch.cat((turned_THR.to(x_THD.dtype), x_THD[..., size:]), dim=-1)
    return turned_THR.to(x_THD.dtype)
