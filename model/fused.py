"""Between matrix products one kernel instead of several, on a GPU: norms, rotation, and the product of a gated MLP.

`fuse` makes a loaded model compute these by `model.fused_kernels`, each kind if it holds: tried on the model's own
tensors, on their device, against what PyTorch computes. What fails or differs stays as it was.

Legend: T packed tokens, E hidden size, H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from model.kinds import MlpKind
from model.layers import GatedMlp, RMSNorm
from model.positions import rotate_each
from model.transformer import Attention, Transformer

try:
    from model import fused_kernels
except ImportError:  # no triton: it comes with PyTorch for CUDA
    fused_kernels = None  # type: ignore[assignment]

DEVICE = "cuda"
# Of the largest number, by dtype: sums in another order may round to the neighbour.
_TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_TRIED_ROWS = 5


class FusedRMSNorm(RMSNorm):
    """`RMSNorm` in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """See `RMSNorm.forward`."""
        return fused_kernels.rms_norm(x, self.weight, self.eps, self.unit_offset)


class FusedGatedMlp(GatedMlp):
    """`GatedMlp` with SiLU, its product in one kernel."""

    def forward(self, x_TE: Tensor) -> Tensor:
        """See `GatedMlp.forward`."""
        out: Tensor = self.down(fused_kernels.silu_product(self.gate_up(x_TE)))
        return out


def fuse(model: Transformer) -> tuple[str, ...]:
    """Make a loaded model compute by fewer kernels. Returns what was left out, each with the reason."""
    weight = model.token_embedding.weight
    if fused_kernels is None:
        return ("fused kernels: triton is not installed",)
    if weight.device.type != DEVICE or weight.dtype not in _TOLERANCES:
        return (f"fused kernels: not for {weight.dtype} on {weight.device.type}",)
    left_out = []
    for name, replace in (("norms", _fuse_norms), ("rotation", _fuse_rotation), ("gated MLPs", _fuse_mlps)):
        try:
            replace(model)
        except Exception as error:  # a compiler, a driver or a kernel of somebody else's may raise anything
            text = str(error).strip()
            left_out.append(f"fused {name}: {text.splitlines()[0] if text else type(error).__name__}")
    return tuple(left_out)


def _fuse_norms(model: Transformer) -> None:
    norms = [module for module in model.modules() if type(module) is RMSNorm]
    for norm in {len(norm.weight): norm for norm in norms}.values():
        x_TE = torch.randn((_TRIED_ROWS, len(norm.weight)), device=norm.weight.device).to(norm.weight.dtype)
        compare(partial(FusedRMSNorm.forward, cast(FusedRMSNorm, norm)), norm, x_TE)
    for norm in norms:
        norm.__class__ = FusedRMSNorm  # the same tensors, computed otherwise


def _fuse_rotation(model: Transformer) -> None:
    if model.rotary is None:
        return
    config, weight = model.config, model.token_embedding.weight
    rotation = model.rotary(torch.arange(_TRIED_ROWS, device=weight.device))
    num_heads = (config.num_heads, config.num_kv_heads)
    x_THD = torch.randn((_TRIED_ROWS, sum(num_heads), config.head_dim), device=weight.device).to(weight.dtype)

    def both(rotate_pair: Callable[..., tuple[Tensor, Tensor]], x_THD: Tensor) -> Tensor:
        return torch.cat(rotate_pair(*x_THD.split(num_heads, dim=1), rotation), dim=1)

    compare(partial(both, fused_kernels.rotate_pair), partial(both, rotate_each), x_THD)
    for module in model.modules():
        if isinstance(module, Attention):
            module.rotate_pair = fused_kernels.rotate_pair


def _fuse_mlps(model: Transformer) -> None:
    config, weight = model.config, model.token_embedding.weight
    if config.mlp is not MlpKind.SWIGLU:
        return
    x = torch.randn((_TRIED_ROWS, 2 * config.mlp_size), device=weight.device).to(weight.dtype)
    compare(fused_kernels.silu_product, silu_product, x)
    for module in model.modules():
        if type(module) is GatedMlp:
            module.__class__ = FusedGatedMlp  # the same matrices


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of matrices (..., 2F) that hold both side by side: (..., F). As `GatedMlp` computes it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@torch.inference_mode()
def compare(fused: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Raises ValueError: the two differ by more than rounding, or a number is not finite."""
    found, expected = fused(x).float(), plain(x).float()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= _TOLERANCES[x.dtype]:  # nor is NaN
        raise ValueError(f"differs by {error:.1e} of the largest number")
