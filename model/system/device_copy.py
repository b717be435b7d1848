"""Arrays of the host on a device: one asynchronous copy for all arrays of a step, or memory that kernels read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes: kernels read 16 bytes at a time from aligned addresses


def copy_to_device(device: torch.device, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return arrays of the host as tensors on a device; on a CPU, the tensors share the arrays' memory.

    All arrays are packed into one buffer of pinned memory, and take one asynchronous copy. A copy of pageable memory
    would make the host wait.
    """
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts[:-1], arrays, strict=True):
        host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    packed = host.to(device, non_blocking=True)
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts[:-1], arrays, strict=True)
    ]


def readable_by(device: torch.device, array: NDArray[Any]) -> Tensor:
    """Return an array as a tensor of the host that kernels of the device read in place: pinned memory for a GPU.

    The caller must hold it until those kernels are computed: the allocator of pinned memory does not know of them.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return torch.empty(array.shape, dtype=tensor.dtype, pin_memory=device.type == "cuda").copy_(tensor)
