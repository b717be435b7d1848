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
    float32 products, as in training. The frequencies of LongRoPE and dynamic scaling depend on `max_context_length`.
    """

    frequencies: Tensor

    def __init__(
        self, rotary_dim: int, theta: float, scaling: RopeScaling | None, *, max_context_length: int = 0
    ) -> None:
        super().__init__()
        divisors = None if scaling is None else scaling.divisors(max_context_length)
        base = stretched_theta(theta, rotary_dim, scaling, max_context_length)
        frequencies = scale_frequencies(_frequencies(rotary_dim, base, divisors), theta, scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.factor = 1.0 if scaling is None else scaling.rotation_factor

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of each position's rotation angles: two float32 tensors (positions, 1, R).

        YaRN and LongRoPE multiply both by a factor.
        """
        angles = (positions_T[:, None].float() * self.frequencies).repeat(1, 2)[:, None]
        if self.factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self.factor, angles.sin() * self.factor


def _frequencies(size: int, theta: float | Tensor, divisors: Sequence[float] | None = None) -> Tensor:
    """Return the frequencies theta^(-j/size) of all even j from 0 to size - 1, divided by `divisors`, in float32.

    divisors: a divisor for each frequency, or one for all; None: no division.
    """
    # On the CPU even if the model is built on the meta device: constants are not loaded from the checkpoint.
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    wavelengths = theta**exponents
    return 1.0 / (wavelengths if divisors is None else torch.tensor(divisors, device="cpu") * wavelengths)


def stretched_theta(theta: float, size: int, scaling: RopeScaling | None, max_context_length: int) -> float | Tensor:
    """Return the base of the frequencies: `theta`, or a larger float32 base if dynamic scaling extends the context.

    dynamic: "dynamic NTK" scaling of Peng et al. 2023 (arXiv 2309.00071), section 3.3, with the factor of the
    transformers library. The lowest frequency is divided by factor * context / original context - (factor - 1).
    """
    original = None if scaling is None else scaling.dynamic_original
    if scaling is None or original is None or max_context_length <= original:
        return theta
    length = torch.tensor(max_context_length, device="cpu")
    divisor = scaling.factor * length / original - (scaling.factor - 1)
    return theta * divisor ** (size / (size - 2))


def scale_frequencies(frequencies: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the frequencies of rotary positions, scaled for contexts longer than a model was first trained for.

    linear: all frequencies are divided by the factor (Chen et al. 2023, arXiv 2306.15595).
    llama3: let r = original context / wavelength. Frequencies with r under `low_freq_factor` are divided by the factor,
    frequencies with r over `high_freq_factor` are unchanged, with a linear ramp in r between: "NTK by parts" of Peng et
    al. 2023 (arXiv 2309.00071), section 3.2.
    yarn: as llama3, with a ramp over the frequency's index i: from the index of the frequency that makes `beta_fast`
    turns in the original context (unchanged) to that of `beta_slow` turns (divided), rounded outwards (the same
    section).
    longrope, dynamic: unchanged, because `RopeScaling.divisors` or `stretched_theta` has scaled them already.
    proportional: all frequencies are divided by the factor, and those after the first `rotated_fraction` are set to 0.
    """
    if scaling is None or scaling.kind in (RopeScalingKind.LONGROPE, RopeScalingKind.DYNAMIC):
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind is RopeScalingKind.PROPORTIONAL:
        assert scaling.rotated_fraction is not None
        stretched[int(scaling.rotated_fraction * len(frequencies)) :] = 0
        return stretched
    if scaling.kind is RopeScalingKind.LINEAR:
        return stretched
    original = scaling.original_context_length
    assert original is not None
    if scaling.kind is RopeScalingKind.YARN:
        assert scaling.beta_fast is not None
        assert scaling.beta_slow is not None
        stretched = _frequencies(2 * len(frequencies), theta, (scaling.factor,))
        return _yarn(frequencies, stretched, theta, original, (scaling.beta_fast, scaling.beta_slow))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    wavelengths = 2 * math.pi / frequencies
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * stretched + kept * frequencies


def _yarn(kept: Tensor, stretched: Tensor, theta: float, original: int, turns: tuple[float, float]) -> Tensor:
    """Return YaRN's frequencies: a ramp from the unscaled `kept` to the scaled `stretched`, as in the authors' code.

    turns: beta_fast and beta_slow, the turns in the original context of the frequencies at the ramp's two ends.
    """
    size = 2 * len(kept)
    first, last = (size * math.log(original / (2 * math.pi * each)) / (2 * math.log(theta)) for each in turns)
    start, end = max(math.floor(first), 0), min(math.ceil(last), size - 1)
    numbers = torch.arange(len(kept), dtype=torch.float32, device="cpu")
    part = 1 - ((numbers - start) / (end - start if end != start else 0.001)).clamp(0, 1)
    return stretched * (1 - part) + kept * part


def score_factors(positions_T: Tensor, growth: float, interval: int) -> Tensor:
    """Return the factors of the scores of queries at these positions, float32; see `ModelConfig.score_growth`."""
    return 1.0 + growth * torch.log1p(torch.floor(positions_T.float() / interval))


def rotate(x_THD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first R dimensions of each head of each token, in float32.

    rotation: cosines and sines of the tokens' rotation angles.
    """
    cos_T1R, sin_T1R = rotation
    size = cos_T1R.shape[-1]
    x_THR = x_THD[..., :size].float()
    first, second = x_THR.chunk(2, dim=-1)
    turned_THR = x_THR * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R
    if size < x_THD.shape[-1]:
        return torch.cat((turned_THR.to(x_THD.dtype), x_THD[..., size:]), dim=-1)
    return turned_THR.to(x_THD.dtype)
