"""Roofline of this machine: measured limits, and the bytes and FLOPs of a step by formula.

    bytes of a decode step      W w + B C k          (every weight once, every sequence's keys and values once)
    FLOPs of a decode step      2 W B + 4 B C A
    bytes of a prefill          W w s                (n tokens, in s steps of at most --max-batched-tokens tokens)
    FLOPs of a prefill          2 (W - H) n + 2 H + 2 n (n + 1) A

    W  weights of all matrix products, H of them in the output head
    w  bytes of one weight
    B  sequences, of C tokens each
    k  bytes of KV-cache per token
    A  sum over layers of h d (h query heads of d numbers)

Activations, norms, and writes to the KV-cache are left out: they are under a percent. A layer with a sliding window
reads no more than its window. Source of the bound: Williams et al. 2009, "Roofline".
"""

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model.config import ModelConfig
from model.nn.linear import can_pack
from model.nn.matrix_kinds import QUANTIZED_BYTES, matrix_kind

_READ_BYTES = 256 * 2**20  # far larger than any cache
_SIDES, _TRIES = (512, 2048), 5

WEIGHT_BYTES = {**QUANTIZED_BYTES, "fp8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits of a device: bytes/s of memory reads, and FLOP/s of matrix products in the weights' dtype."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that an engine step has to read, and FLOPs that it has to compute."""

    bytes: int
    flops: int

    def bound_seconds(self, machine: Machine) -> float:
        """Return the least seconds in which the machine can do this work, if memory reads and products overlap."""
        return max(self.bytes / machine.bytes_per_second, self.flops / machine.flops_per_second)


class WorkFormula:
    """Formulas of the bytes and FLOPs of one model's engine steps. The weight type is a key of `WEIGHT_BYTES`."""

    def __init__(self, config: ModelConfig, weight_type: str, kv_value_bytes: int) -> None:
        shapes = config.parameter_shapes()
        multiplied = ("layers.", "layer_inputs.projection.")
        layers = {
            name: math.prod(shape) for name, shape in shapes.items() if name.startswith(multiplied) and len(shape) == 2
        }
        self._num_expert_weights = sum(size for name, size in layers.items() if ".experts." in name)
        # Share of the experts that computes one row.
        self._expert_share = 0.0 if config.experts is None else config.experts.num_per_token / config.experts.num
        self._config = config
        self._head = config.vocab_size * config.hidden_size
        matrices = {**layers, "lm_head.weight": self._head}
        num_bytes = sum(size * WEIGHT_BYTES[matrix_kind(weight_type, name)] for name, size in matrices.items())
        self._value_bytes = num_bytes / sum(matrices.values())
        # The input embedding is only looked up.
        unused = round(self._num_expert_weights * (1 - self._expert_share))
        self.num_multiplied = sum(layers.values()) - unused + self._head
        self._layers = range(config.num_layers)
        self._kv_bytes = [config.kv_bytes_of(layer, kv_value_bytes) for layer in self._layers]
        self._query_sizes = [config.num_heads * config.head_dim_of(layer) for layer in self._layers]

    def _weight_bytes(self, num_rows: int) -> int:
        """Return the bytes of the weights that a step of `num_rows` tokens reads.

        A step reads only the experts that its tokens use. Their number is the mean for random choices.
        """
        read = 1 - (1 - self._expert_share) ** num_rows
        return round((self.num_multiplied + self._num_expert_weights * (read - self._expert_share)) * self._value_bytes)

    def decode(self, *, batch_size: int, context_length: float) -> Work:
        """Return the work of a decode step of `batch_size` sequences with a mean length of `context_length` tokens."""
        windows = map(self._config.window, self._layers)
        seen = [context_length if window is None else min(context_length, window) for window in windows]
        return Work(
            self._weight_bytes(batch_size) + round(batch_size * sum(map(operator.mul, seen, self._kv_bytes))),
            2 * self.num_multiplied * batch_size
            + round(4 * batch_size * sum(map(operator.mul, seen, self._query_sizes))),
        )

    def prompt(self, *, num_tokens: int, tokens_per_step: int) -> Work:
        """Return the work of the steps that prefill one prompt, alone in the engine and without a cached prefix."""
        steps = -(-num_tokens // tokens_per_step)
        windows = (self._config.window(layer) or num_tokens for layer in self._layers)
        pairs = [sum(min(position, window) for position in range(1, num_tokens + 1)) for window in windows]
        linear = 2 * (self.num_multiplied - self._head) * num_tokens + 2 * self._head
        attention = 4 * sum(map(operator.mul, pairs, self._query_sizes))
        return Work(self._weight_bytes(tokens_per_step) * steps, linear + attention)


class Roofline:
    """Measurement of a device's limits, by a sum over a large array and by matrix products of the given weight type.

    Each limit is the fastest of several tries.
    """

    def __init__(
        self, weight_type: str, device: str, read_bytes: int | None = None, sides: Sequence[int] | None = None
    ) -> None:
        self._array = torch.ones((read_bytes or _READ_BYTES) // 4, dtype=torch.float32, device=device)
        sides = sides or _SIDES
        seconds = [_best_seconds(way) for way in products(weight_type, sides[0], device)]
        # Ways that are much slower are not the limit, and would take minutes.
        self._products = [
            (2 * side**3, way)
            for side in sides
            for way, needed in zip(products(weight_type, side, device), seconds, strict=True)
            if needed <= 2 * min(seconds)
        ]

    @torch.inference_mode()
    def probe(self) -> Machine:
        """Measure memory bandwidth and FLOP/s of the device now."""
        read = self._array.nbytes / _best_seconds(self._array.sum)
        return Machine(read, max(flops / _best_seconds(way) for flops, way in self._products))


def products(weight_type: str, side: int, device: str) -> list[Callable[[], torch.Tensor]]:
    """Return functions that multiply two matrices of `weight_type`, one per way to do it. All integers run as int8.

    A CPU may widen numbers of at most 16 bits to float32, which is the fastest without instructions for them.
    """
    x_MK, weight_NK = torch.randn(2, side, side, device=device).unbind()
    ways: list[Callable[[], torch.Tensor]] = []
    if device == "cpu" and weight_type != "float64":
        ways.append(lambda: torch.nn.functional.linear(x_MK, weight_NK))
    if weight_type in ("int8", "int6", "int4"):
        ints_MK, ints_NK = torch.randint(-127, 128, (2, side, side), device=device).to(torch.int8).unbind()
        return [*ways, lambda: torch._int_mm(ints_MK, ints_NK.t())]
    if weight_type == "fp8":
        narrow_MK, narrow_NK = x_MK.to(torch.float8_e4m3fn), weight_NK.to(torch.float8_e4m3fn)
        ones_M1, ones_1N = torch.ones(side, 1, device=device), torch.ones(1, side, device=device)
        return [*ways, lambda: torch._scaled_mm(narrow_MK, narrow_NK.t(), ones_M1, ones_1N, out_dtype=torch.bfloat16)]
    dtype: torch.dtype = getattr(torch, weight_type)
    typed_MK, typed_NK = x_MK.to(dtype), weight_NK.to(dtype)
    if dtype != torch.float32 or not ways:
        ways.append(lambda: torch.nn.functional.linear(typed_MK, typed_NK))
    if can_pack(device, dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(typed_NK, None)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(typed_MK, packed, None, "none", [], ""))
    return ways


def _best_seconds(work: Callable[[], object]) -> float:
    """Return the shortest time in seconds of several calls of a function, after one warm-up call."""
    seconds = []
    for _ in range(_TRIES + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
