"""Matrix layout of the native kernels: panels of 64 outputs, with a few inputs side by side.

Legend: F outputs, I inputs of a matrix, N panels, G groups of inputs, S inputs side by side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 16
_PANEL = 64  # outputs of one task; matrices are padded to whole panels
_HALF_PANEL = _PANEL // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Packed matrix of `inputs` by `outputs`. Outputs are padded with zeros, and the vectors have the same length.

    weight: may be a view.
    shift: for int8, 128 times the sum of each output's weights, because the kernels add 128 to every input.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    inputs: int
    outputs: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors in the order of linear.h's `Matrix`."""
        return self.weight, self.bias, self.scale, self.shift


def padded(size: int) -> int:
    """Round a size up to whole panels."""
    return -(-size // _PANEL) * _PANEL


def pack_floats(weight_FI: Tensor, bias_F: Tensor | None, side_by_side: int) -> Packed:
    """Pack a matrix in its own dtype, and its bias in float32."""
    outputs, inputs = weight_FI.shape
    return Packed(
        weight=_panels(weight_FI, side_by_side),
        bias=None if bias_F is None else _longer(bias_F.float()),
        scale=None,
        shift=None,
        inputs=inputs,
        outputs=padded(outputs),
    )


def pack_int8(weight_FI: Tensor, scale_F: Tensor, bias_F: Tensor | None, side_by_side: int) -> Packed:
    """Pack an int8 matrix with a scale per output."""
    outputs, inputs = weight_FI.shape
    return Packed(
        weight=_panels(weight_FI, side_by_side),
        bias=None if bias_F is None else _longer(bias_F.float()),
        scale=_longer(scale_F),
        shift=_longer(128 * weight_FI.sum(dim=1, dtype=torch.int32)),
        inputs=inputs,
        outputs=padded(outputs),
    )


def interleaved(rows: Tensor) -> Tensor:
    """Interleave gate rows and gated rows, F each, in blocks of 16, so that one task computes both rows of a pair.

    Each half is first padded with zeros to whole half panels.
    """
    half = len(rows) // 2
    room = -(-half // _HALF_PANEL) * _HALF_PANEL
    halves = rows.new_zeros(2, room, *rows.shape[1:])
    halves[:, :half] = torch.unflatten(rows, 0, (2, half))
    return torch.unflatten(halves, 1, (-1, BLOCK)).transpose(0, 1).flatten(0, 2)


def _panels(weight_FI: Tensor, side_by_side: int) -> Tensor:
    """Return FI as N G 64 S: a view, or a copy if padding is needed."""
    outputs, inputs = weight_FI.shape
    groups = -(-inputs // side_by_side)
    missing = groups * side_by_side - inputs, padded(outputs) - outputs
    if any(missing):
        weight_FI = functional.pad(weight_FI, (0, missing[0], 0, missing[1]))
    return weight_FI.view(-1, _PANEL, groups, side_by_side).transpose(1, 2)


def _longer(vector_F: Tensor) -> Tensor:
    return functional.pad(vector_F, (0, padded(len(vector_F)) - len(vector_F)))
