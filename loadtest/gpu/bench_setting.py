"""Device and sizes of `loadtest.gpu.bench_gpu`: the same code for a GPU, and with small sizes for a CPU."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    the machine's probe. streams, output: concurrent requests to a whole engine, and tokens of their completions.
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
    output: int
    streams: tuple[int, ...]
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


# Shape of Qwen2 with 1.5 billion parameters (its config.json).
_QWEN2: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "max_context_length": 32_768,
    "num_layers": 28,
    "hidden_size": 1536,
    "num_heads": 12,
    "num_kv_heads": 2,
    "head_dim": 128,
    "mlp_size": 8960,
    "position": "rotary",
    "rope_theta": 1_000_000.0,
    "norm": "rms_norm",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "tie_embeddings": True,
}
_TINY = {"vocab_size": 300, "max_context_length": 64, "num_layers": 2, "hidden_size": 64, "mlp_size": 96} | {
    "num_heads": 4,
    "head_dim": 16,
}


def full(device: torch.device) -> Bench:
    """Return the sizes for a GPU."""
    return Bench(
        device=device,
        dtype=torch.bfloat16,
        shape=ModelConfig.from_dict(dict(_QWEN2)),
        batches=(1, 2, 4, 8, 16, 32, 64),
        context=1024,
        attention=((12, 2, 128), (32, 8, 128), (6, 6, 64)),
        attention_contexts=(1024, 8192),
        probe_bytes=4 * 2**30,
        probe_side=8192,
        output=512,
        streams=(1, 16, 64, 256),
    )


def tiny(device: torch.device) -> Bench:
    """Return small sizes that take a second on a CPU."""
    return Bench(
        device=device,
        dtype=torch.float32,
        shape=ModelConfig.from_dict({**_QWEN2, **_TINY}),
        batches=(1, 5),
        context=40,
        attention=((4, 2, 16),),
        attention_contexts=(40,),
        probe_bytes=2**20,
        probe_side=64,
        output=16,
        streams=(1, 3),
        repeats=2,
    )
