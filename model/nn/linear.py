"""Linear layers for serving on CPUs: packed for oneDNN, int8, or 4, 6 or 8 bits in groups.

With two or more rows, a row's result is batch-invariant (measured up to 1,024 rows, on one thread): oneDNN may sum a
single row in another order. See `service.engine.scheduling.step_plan.MIN_ROWS`.

Legend: T packed tokens, E inputs, F outputs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from model.nn.grouped_weight import (
    GROUP_SIZE,
    DeferredWeight,
    GroupedWeight,
    Int4Weight,
    StoredWeight,
    quantize_weight,
)
from model.nn.matrix_kinds import matrix_kind
from model.nn.transformer import Transformer

_EXACT_INPUTS = 1024  # of int8 products whose float32 sums are exact
_TINY = 1e-30  # keeps the scale of a row of zeros from being zero

AnyGroupedWeight: TypeAlias = GroupedWeight | StoredWeight | DeferredWeight


class PackedLinear(nn.Module):
    """Linear layer x W^T + b with W in oneDNN's memory layout; float32 or bfloat16, on the CPU."""

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_FE.detach(), None)
        self.bias_F = None if bias_F is None else bias_F.detach()

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the layer to each token's inputs: (tokens, inputs) to (tokens, outputs)."""
        out_TF: Tensor = torch.ops.mkldnn._linear_pointwise(x_TE, self.packed, self.bias_F, "none", [], "")
        return out_TF


class Int8Linear(nn.Module):
    """Linear layer x W^T + b in int8: a scale for each output's weights, another for each token's inputs.

    Dettmers et al. 2022 (arXiv 2208.07339), section 2.1. Int8 sums are exact, so results are batch-invariant.

    scale_F: scales of an int8 weight; None: the weight is float, and is quantized here.
    """

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None, scale_F: Tensor | None = None) -> None:
        super().__init__()
        self.weight_FE, self.scale_F = (
            quantize_rows(weight_FE.detach()) if scale_F is None else (weight_FE, scale_F.contiguous())
        )
        self.bias_F = None if bias_F is None else bias_F.detach().float()

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the layer to each token's inputs: (tokens, inputs) to (tokens, outputs), in the dtype of x."""
        rounded_TE, scale_T = quantize_rows(x_TE)
        return scale_sums(int8_sums(rounded_TE, self.weight_FE), scale_T, self.scale_F, self.bias_F, x_TE.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the dequantized weights of the outputs `ids`: float32 (ids, inputs)."""
        return self.weight_FE[ids] * self.scale_F[ids, None]


class GroupedLinear(nn.Module):
    """Linear layer x W^T + b with weights in groups of inputs, and inputs in int8 with a scale for each token.

    Reference implementation of the native kernel. A group's int8 sum is exact, so results are batch-invariant.
    """

    def __init__(self, weight: AnyGroupedWeight, bias_F: Tensor | None) -> None:
        super().__init__()
        self.stored = weight
        self.bias_F = None if bias_F is None else bias_F.detach().float()

    @functools.cached_property
    def weight(self) -> GroupedWeight:
        """The weights, unpacked at their first use."""
        return self.stored if isinstance(self.stored, GroupedWeight) else self.stored.read()

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the layer to each token's inputs: (tokens, inputs) to (tokens, outputs), in the dtype of x."""
        rounded_TE, scale_T = quantize_rows(x_TE)
        sums_TF = _sum_groups(rounded_TE, self.weight.codes_FI, *self._multiplied, self.weight.group_size)
        return scale_sums(sums_TF, scale_T, torch.ones(()), self.bias_F, x_TE.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the dequantized weights of the outputs `ids`: float32 (ids, inputs)."""
        return self.weight.select(ids).dense()

    @functools.cached_property
    def _multiplied(self) -> tuple[Tensor, Tensor | None]:
        return self.weight.multiplied()


class Int4Linear(GroupedLinear):
    """Linear layer x W^T + b with 4-bit weights in groups of 32 inputs, and inputs in int8 with a scale for each token.

    Reference implementation of the native kernel. A result is one sum of integers, see `Int4Weight`.
    """

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the layer to each token's inputs: (tokens, inputs) to (tokens, outputs), in the dtype of x."""
        rounded_TE, scale_T = quantize_rows(x_TE)
        weight = self._integers
        offset_FG = None if weight.offset_FG is None else weight.offset_FG.int()
        sums_TF = _sum_groups(rounded_TE, weight.codes_FI, weight.multiplier_FG.int(), offset_FG)
        return scale_sums(sums_TF, scale_T, weight.scale_F, self.bias_F, x_TE.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the dequantized weights of the outputs `ids`: float32 (ids, inputs)."""
        return self.weight.select(ids).to_int4().dense()

    @functools.cached_property
    def _integers(self) -> Int4Weight:
        return self.weight.to_int4()


def _sum_groups(
    rounded_TE: Tensor, codes_FI: Tensor, scale_FG: Tensor, offset_FG: Tensor | None, size: int = GROUP_SIZE
) -> Tensor:
    """Return the products of int8 inputs and grouped weights, in the dtype of the scales and offsets."""
    sums_TF = torch.zeros(len(rounded_TE), len(codes_FI), dtype=scale_FG.dtype)
    groups = zip(rounded_TE.split(size, dim=1), codes_FI.split(size, dim=1), strict=True)
    for group, (part_TS, codes_FS) in enumerate(groups):
        sums_TF.addcmul_(int8_sums(part_TS, codes_FS).to(sums_TF.dtype), scale_FG[:, group])
        if offset_FG is not None:
            sums_TF.addcmul_(part_TS.sum(dim=1, keepdim=True).to(sums_TF.dtype), offset_FG[:, group])
    return sums_TF


def make_grouped_linear(weight: AnyGroupedWeight, bias_F: Tensor | None) -> GroupedLinear:
    """Return a linear layer with this weight: `Int4Linear` for 4 bits, else `GroupedLinear`."""
    return (Int4Linear if weight.bits == 4 else GroupedLinear)(weight, bias_F)


class QuantizedEmbedding(nn.Embedding):
    """Embedding whose rows are the weights of a quantized linear layer, for example of a tied LM head.

    Its `weight` is empty, and has the model's dtype and device.
    """

    def __init__(self, linear: Int8Linear | GroupedLinear, dtype: torch.dtype) -> None:
        super().__init__(0, 1, dtype=dtype)
        self.linear = linear

    def forward(self, input: Tensor) -> Tensor:
        """Return each token's embedding: (tokens, hidden size)."""
        return self.linear.rows(input).to(self.weight.dtype)


class StackedLinear(nn.Module):
    """Weights of a linear layer before it is packed or quantized. Has no `forward`, so the layer cannot be computed.

    parts: matrices that are one below the other in the layer's matrix, for example of queries, keys and values, each
    mapped from a checkpoint file.
    """

    def __init__(self, parts: Sequence[Tensor], bias_F: Tensor | None) -> None:
        super().__init__()
        self.parts, self.bias = parts, bias_F

    @property
    def weight(self) -> Tensor:
        """Return a copy of the whole matrix (F, E)."""
        return torch.cat([*self.parts])


def int8_sums(x_TE: Tensor, weight_FE: Tensor) -> Tensor:
    """Return the products x W^T of int8 matrices, exact in int32.

    PyTorch's product is fast only with instructions for it (VNNI). Without them, float32 products of up to 1,024 inputs
    are twenty times as fast, and exact too: their sums are below 2^24.
    """
    if torch.cpu._is_vnni_supported():
        return torch._int_mm(x_TE, weight_FE.t())
    parts = zip(x_TE.split(_EXACT_INPUTS, dim=1), weight_FE.split(_EXACT_INPUTS, dim=1), strict=True)
    sums_TF = torch.zeros(len(x_TE), len(weight_FE), dtype=torch.int32)
    for x_TS, weight_FS in parts:
        sums_TF += (x_TS.float() @ weight_FS.float().t()).int()
    return sums_TF


def quantize_rows(x_TE: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantize each row of a matrix to int8 or fp8. Return the quantized matrix, and the float32 scale of each row.

    A row's largest absolute value becomes the largest number of the dtype, which is 127 for int8.
    """
    x_TE = x_TE.float()
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale_T = x_TE.abs().amax(dim=1).clamp_(min=_TINY) / largest
    scaled_TE = x_TE / scale_T[:, None]
    return (scaled_TE.round_() if dtype == torch.int8 else scaled_TE).to(dtype), scale_T


def scale_sums(sums_TF: Tensor, scale_T: Tensor, scale_F: Tensor, bias_F: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize sums of int8 or fp8 products: multiply by the scales of row and output, add the bias, cast."""
    out_TF = sums_TF.float() * scale_T[:, None] * scale_F
    return (out_TF if bias_F is None else out_TF + bias_F.float()).to(dtype)


MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]  # from a weight FE and a bias F
LINEAR_KINDS: dict[str, MakeLinear] = {
    "packed": PackedLinear,
    "int8": Int8Linear,
    "int4": lambda weight_FE, bias_F: Int4Linear(quantize_weight(weight_FE), bias_F),
}


def can_pack(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Return whether to use `PackedLinear`: on a CPU for which oneDNN has kernels of this dtype."""
    if torch.device(device).type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replace_linears(model: Transformer, kind: str | MakeLinear) -> None:
    """Replace every linear layer of a model, in place, by a kind in `LINEAR_KINDS` or by a function's result.

    For int4, `matrix_kind` selects the kind of each matrix: some become int8. Each original is freed. A tied LM head
    becomes a layer of its own. If the LM head is quantized, the token embedding reads its rows (`QuantizedEmbedding`);
    otherwise the token embedding stays in memory too.
    """

    def make(name: str, weight_FE: Tensor, bias_F: Tensor | None) -> nn.Module:
        make_kind = LINEAR_KINDS[matrix_kind(kind, name)] if isinstance(kind, str) else kind
        return make_kind(weight_FE, bias_F)

    if model.lm_head is None:
        weight_VE = model.token_embedding.weight
        model.lm_head = make("lm_head.weight", weight_VE, None)
        if isinstance(model.lm_head, Int8Linear | GroupedLinear):
            model.token_embedding = QuantizedEmbedding(model.lm_head, weight_VE.dtype)
        del weight_VE
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear | StackedLinear)]
    for path in paths:
        child: Any = model.get_submodule(path)
        model.set_submodule(path, make(f"{path}.weight", child.weight, child.bias))
        del child
