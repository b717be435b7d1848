"""Device and sizes of `loadtest.gpu.bench_gpu`: the same code for a GPU, and with small sizes for a CPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loadtest.measurement.roofline import Machine
from loadtest.measurement.spread import Spread
from model.attention.kernel_selection import KernelContext
from model.config import ModelConfig
from service.engine.execution.cuda_graphs import Capture, CudaCapture, call_again

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Device and sizes of the benchmarks.

    shape: shape of the large model. batches, context: sizes of its decode steps. probe_bytes, probe_side: sizes of
    the machine's probe. prompt, output: tokens of a request to a whole engine. streams: concurrent requests to it.
    """

    device: torch.device
    dtype: torch.dtype
    shape: ModelConfig
    batches: tuple[int, ...]
    context: int
    attention: tuple[tuple[int, int, int], ...]
    attention_contexts: tuple[int, ...]
    probe_bytes: int
    probe_side: int
    prompt: int
    output: int
    streams: int
    repeats: int = 5

    def place(self, config: ModelConfig | None = None) -> KernelContext:
        """Return the device, dtype and model for which attention kernels are chosen."""
        return KernelContext(
            config=self.shape if config is None else config,
            device=self.device,
            dtype=self.dtype,
            block_size=BLOCK_SIZE,
        )

    @torch.inference_mode()
    def probe(self) -> Machine:
        """Measure the machine's limits: reading an array larger than any cache, and a product of square matrices.

        The best of several tries counts.
        """
        array = torch.ones(self.probe_bytes // 4, dtype=torch.float32, device=self.device)
        x_MK, weight_NK = torch.randn((2, self.probe_side, self.probe_side), device=self.device).to(self.dtype)
        read = min(self.seconds(array.sum, 5).values)
        multiply = min(self.seconds(lambda: torch.nn.functional.linear(x_MK, weight_NK), 5).values)
        return Machine(array.nbytes / read, 2 * self.probe_side**3 / multiply)

    def capture(self) -> Capture:
        """Return the capture function: CUDA graphs, or on other devices the plain function."""
        return CudaCapture() if self.device.type == "cuda" else call_again

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int) -> Spread:
        """Return the time per call over `times` calls in a row, repeated."""
        work()
        values = []
        for _ in range(self.repeats):
            self.wait()
            began = time.perf_counter()
            for _ in range(times):
                work()
            self.wait()
            values.append((time.perf_counter() - began) / times)
        return Spread(tuple(values))
