"""Fused GPU kernels between matrix products: norms, rotary rotation, and the activation of a gated MLP.

`fuse` replaces these parts of a loaded model by `model.gpu.fused_kernels`. Each kind of kernel is first tested on the
GPU against PyTorch, with the model's own norm weights and rotations and random inputs. A kind that fails or differs is
not used.

Legend: T packed tokens, E hidden size, H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from model.config_enums import MlpKind
from model.nn.layers import GatedMlp, RMSNorm
from model.nn.position_embeddings import rotate_each
from model.nn.transformer import Attention, Transformer

try:
    from model.gpu import fused_kernels
except ImportError:  # no triton: it comes with PyTorch for CUDA
    fused_kernels = None  # type: ignore[assignment]

DEVICE = "cuda"
# Allowed error by dtype, relative to the largest number: a sum in another order may round to the neighbouring value.
_TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_TRIED_ROWS = 5


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


def fuse(model: Transformer) -> tuple[str, ...]:
    """Replace parts of a loaded model by fused kernels. Return the kinds that were left out, each with the reason."""
    weight = model.token_embedding.weight
    if fused_kernels is None:
        return ("fused kernels: triton is not installed",)
    if weight.device.type != DEVICE or weight.dtype not in _TOLERANCES:
        return (f"fused kernels: not for {weight.dtype} on {weight.device.type}",)
    left_out = []
    for name, replace in (("norms", _fuse_norms), ("rotation", _fuse_rotation), ("gated MLPs", _fuse_mlps)):
        try:
            replace(model)
        except Exception as error:  # the Triton compiler, the driver and third-party kernels may raise any type
            text = str(error).strip()
            left_out.append(f"fused {name}: {text.splitlines()[0] if text else type(error).__name__}")
    return tuple(left_out)


def _fuse_norms(model: Transformer) -> None:
    norms = [module for module in model.modules() if type(module) is RMSNorm]
    for norm in {len(norm.weight): norm for norm in norms}.values():
        x_TE = torch.randn((_TRIED_ROWS, len(norm.weight)), device=norm.weight.device).to(norm.weight.dtype)
        compare(partial(FusedRMSNorm.forward, cast(FusedRMSNorm, norm)), norm, x_TE)
    for norm in norms:
        norm.__class__ = FusedRMSNorm  # keeps the tensors, replaces only forward()


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
            module.__class__ = FusedGatedMlp  # keeps the matrices, replaces only forward()


def silu_product(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up as `GatedMlp` does, from (..., 2F) with both halves side by side to (..., F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@torch.inference_mode()
def compare(fused: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare a fused kernel with the plain computation.

    Raises:
        ValueError: the results differ by more than rounding, or contain NaN or infinity.
    """
    found, expected = fused(x).float(), plain(x).float()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= _TOLERANCES[x.dtype]:  # `not <=` catches NaN too
        raise ValueError(f"differs by {error:.1e} of the largest number")
