"""Norms and MLPs.

Legend: T packed tokens, E hidden size, F feed-forward size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.config import ModelConfig
from model.kinds import MlpKind, NormKind


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32: Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; any leading shape."""
        normed = functional.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32: Ba et al. 2016 (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; any leading shape."""
        weight, bias = self.weight.float(), self.bias.float()
        return functional.layer_norm(x.float(), (x.shape[-1],), weight, bias, self.eps).to(x.dtype)


class GeluMlp(nn.Module):
    """down(gelu(up(x))), tanh form: GPT-2; Hendrycks & Gimpel 2016 (arXiv 1606.08415)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        """TE -> TE."""
        out: Tensor = self.down(functional.gelu(self.up(x_TE), approximate="tanh"))
        return out


class SwigluMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix: Shazeer 2020 (arXiv 2002.05202), equation 6."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        """TE -> TE."""
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        out: Tensor = self.down(functional.silu(gate_TF) * up_TF)
        return out


NORMS: dict[NormKind, type[RMSNorm] | type[LayerNorm]] = {
    NormKind.RMS_NORM: RMSNorm,
    NormKind.LAYER_NORM: LayerNorm,
}
MLPS: dict[MlpKind, type[GeluMlp] | type[SwigluMlp]] = {MlpKind.GELU: GeluMlp, MlpKind.SWIGLU: SwigluMlp}
