"""Probe of this machine's limits: bytes read per second and FLOPs per second. Imports torch.

Reading sums an array far larger than any cache. Multiplying is a product of square matrices. float32 and bfloat16
use the faster of two libraries (oneDNN with a packed weight, and torch's default), int8 uses `torch._int_mm`. The
probe uses as many threads as the model. The best of several tries counts.
"""

import time
from collections.abc import Callable

import torch

from loadtest.measurement.step_work import Machine
from model.nn.linear import can_pack

_READ_BYTES = 256 * 2**20
_SIDES = (512, 2048)
_TRIES = 5


class Roofline:
    """Probe of the machine's limits, with arrays allocated once.

    Args:
        weight_type: float32, bfloat16, float64, int8 or fp8; the peak is measured for this type.
        device: cpu or cuda.
    """

    def __init__(self, weight_type: str, device: str) -> None:
        self._device = device
        self._array = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
        self._products = [(2 * side**3, way) for side in _SIDES for way in products(weight_type, side, device)]

    @torch.inference_mode()
    def probe(self) -> Machine:
        """Measure the limits now."""
        read = self._best_seconds(lambda: self._array.sum())
        multiply = max(flops / self._best_seconds(product) for flops, product in self._products)
        return Machine(self._array.nbytes / read, multiply)

    def _best_seconds(self, work: Callable[[], object]) -> float:
        work()
        return min(self._seconds(work) for _ in range(_TRIES))

    def _seconds(self, work: Callable[[], object]) -> float:
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def products(weight_type: str, side: int, device: str) -> list[Callable[[], torch.Tensor]]:
    """Return ways to multiply two square matrices of this type (float32, bfloat16, float64, int8 or fp8)."""
    if weight_type == "int8":
        ints_MK, ints_NK = torch.randint(-127, 128, (2, side, side), device=device).to(torch.int8).unbind()
        return [lambda: torch._int_mm(ints_MK, ints_NK.t())]
    if weight_type == "fp8":
        x_MK, weight_NK = torch.randn(2, side, side, device=device).to(torch.float8_e4m3fn).unbind()
        ones_M1, ones_1N = torch.ones(side, 1, device=device), torch.ones(1, side, device=device)
        return [lambda: torch._scaled_mm(x_MK, weight_NK.t(), ones_M1, ones_1N, out_dtype=torch.bfloat16)]
    dtype: torch.dtype = getattr(torch, weight_type)
    x_MK, weight_NK = torch.randn(2, side, side, device=device).to(dtype).unbind()
    ways: list[Callable[[], torch.Tensor]] = [lambda: torch.nn.functional.linear(x_MK, weight_NK)]
    if can_pack(device, dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x_MK, packed, None, "none", [], ""))
    return ways
