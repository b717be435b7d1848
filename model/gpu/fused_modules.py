"""Fused GPU kernels between matrix products: norms, rotary rotation, and the activation of a gated MLP.

`tests/gpu/test_fused.py` compares each kernel with PyTorch on a GPU.

Legend: T packed tokens, E hidden size.
"""

from torch import Tensor

from model.config_enums import MlpKind
from model.nn.layers import GatedMlp, RMSNorm
from model.nn.transformer import Attention, Transformer

try:
    from model.gpu import fused_kernels
except ImportError:  # no triton: it comes with PyTorch for CUDA
    fused_kernels = None  # type: ignore[assignment]


class FusedRMSNorm(RMSNorm):
    """RMS norm in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, as `RMSNorm.forward` does."""
        return fused_kernels.rms_norm(x, self.weight, self.eps, self.unit_offset)


class FusedGatedMlp(GatedMlp):
    """Gated MLP with SiLU, activation and product in one kernel."""

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the MLP, as `GatedMlp.forward` does."""
        out: Tensor = self.down(fused_kernels.silu_product(self.gate_up(x_TE)))
        return out


def fuse(model: Transformer) -> None:
    """Replace parts of a loaded model on a GPU by fused kernels; do nothing without triton or in float64.

    Modules keep their tensors: only the class, and so `forward`, changes.
    """
    if fused_kernels is None or model.token_embedding.weight.dtype.itemsize > 4:
        return
    for module in model.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm
        elif type(module) is GatedMlp and model.config.mlp is MlpKind.SWIGLU:
            module.__class__ = FusedGatedMlp
        elif isinstance(module, Attention):
            module.rotate_pair = fused_kernels.rotate_pair
