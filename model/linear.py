"""How a matrix is multiplied while serving: as it was loaded, packed for the CPU's kernels, or in eight bits.

Training and conversion keep `nn.Linear`; so does a GPU, but for `model.eight_bits`. `replace_linears` makes a loaded
model's matrices into another kind, one after the other, so that no more than one of them is held twice.

Rows are independent in each kind, and from two rows on a row's bits do not depend on how many there are: oneDNN sums
over inputs in one order then (measured from 1 to 1,024 rows, on one thread). A single row may take another
order where there are many inputs; the engine never computes one alone, see `service.engine.plan.MIN_ROWS`.

Legend: T packed tokens, E inputs, F outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.transformer import Transformer

_LARGEST = 127  # of eight bits, the same on both sides of zero
_TINY = 1e-30  # a row of zeros has to be divided by something


class PackedLinear(nn.Module):
    """x W^T + b, with W in the order in which oneDNN's kernels read it. Of float32 or bfloat16, on the CPU."""

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_FE.detach(), None)
        self.bias_F = None if bias_F is None else bias_F.detach()

    def forward(self, x_TE: Tensor) -> Tensor:
        """TE -> TF."""
        out_TF: Tensor = torch.ops.mkldnn._linear_pointwise(x_TE, self.packed, self.bias_F, "none", [], "")
        return out_TF


class Int8Linear(nn.Module):
    """x W^T + b of eight-bit integers: Dettmers et al. 2022 (arXiv 2208.07339), section 2.1, vector-wise.

    Each output has a scale of its weights, each token one of its own inputs, found while serving: no token's result
    depends on another's. Sums of products are exact, so that neither order nor batch changes a bit of them.
    """

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None) -> None:
        super().__init__()
        self.weight_FE, self.scale_F = quantize_rows(weight_FE.detach())
        self.bias_F = None if bias_F is None else bias_F.detach().float()

    def forward(self, x_TE: Tensor) -> Tensor:
        """TE -> TF, in the dtype given."""
        rounded_TE, scale_T = quantize_rows(x_TE)
        sums_TF = torch._int_mm(rounded_TE, self.weight_FE.t())
        out_TF = sums_TF.float() * scale_T[:, None] * self.scale_F
        return (out_TF if self.bias_F is None else out_TF + self.bias_F).to(x_TE.dtype)


def quantize_rows(x_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 TE times a scale T, float32: the largest number of a row becomes 127."""
    x_TE = x_TE.float()
    scale_T = x_TE.abs().amax(dim=1).clamp_(min=_TINY) / _LARGEST
    return (x_TE / scale_T[:, None]).round_().to(torch.int8), scale_T


# How `replace_linears` makes each kind from a weight FE and a bias F.
LINEAR_KINDS: dict[str, Callable[[Tensor, Tensor | None], nn.Module]] = {"packed": PackedLinear, "int8": Int8Linear}


def can_pack(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` works here and is worth it: on a CPU for which oneDNN has kernels of this dtype."""
    if torch.device(device).type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replace_linears(model: Transformer, kind: str) -> None:
    """Make every matrix of a model one of `LINEAR_KINDS`; the plain ones are freed as it goes.

    A tied embedding stays beside its packed twin: the head multiplies by all of it, the lookup needs its rows.

    Raises:
        KeyError: there is no such kind.
    """
    replace_each(model, LINEAR_KINDS[kind])


def replace_each(model: Transformer, make: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
    """`replace_linears` by what makes a matrix of a weight FE and a bias F."""
    if model.lm_head is None:
        model.lm_head = make(model.token_embedding.weight, None)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, make(child.weight, child.bias))
                del child
