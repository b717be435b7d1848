"""Analytic model of decode steps on a GPU: bytes, kernels and microseconds by formula, not measured.

    device time = bytes / (95 % of the card's bandwidth) + kernels * gap + kernels without dependent launch * ramp
    host time   = kernels * launch    without a CUDA graph; the device waits if it is longer than the device time

Sources: bandwidths by NVIDIA's data sheets; the gap between two kernels of a CUDA graph by Hazy Research, "Look Ma, No
Bubbles" (2025). The share of the bandwidth, the ramp and the launch are estimates.
"""

from dataclasses import dataclass
from typing import Final

from loadtest.measurement.model_shapes import shape_config
from loadtest.measurement.roofline import WorkFormula
from model.config import ModelConfig

BANDWIDTHS: Final = {"H100": 3.35e12, "H200": 4.8e12}  # bytes per second
_SHARE = 0.95
_GAP_US, _RAMP_US, _LAUNCH_US = 1.3, 1.0, 8.0
_OTHER_KERNELS = 11  # embedding, rotation table, last addition, final norm, output head, sampling
BATCHES: Final = (1, 4, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Layer:
    """Kernels of a layer in a decode step, and the type of its weights.

    num_dependent: kernels with programmatic dependent launch, which hides their ramps: all Triton kernels.
    """

    num_kernels: int
    num_dependent: int
    weight_type: str = "bfloat16"


# 4 products, 2 norms with the addition before them, rotation with the writes to the cache, attention and its join,
# activation. tests/gpu/test_page.py counts the kernels of FUSED, INT8 and PROMPT.
FUSED: Final = Layer(10, 6)
# In place of 4 fused kernels: 6 of each of 2 norms, 2 additions, 8 of the rotation, 2 writes, 2 of the activation.
UNFUSED: Final = Layer(10 - 4 + 2 * 6 + 2 + 8 + 2 + 2, 2)
# In Qwen2 1.5B, 3 of the products take a second kernel, and the result of attention is quantized by a kernel.
INT8: Final = Layer(14, 14, "int8")
# Of a prompt's step, with one kernel of attention.
PROMPT: Final = Layer(9, 4)
# Without quantization in the kernels of norms and activation.
INT8_APART: Final = Layer(17, 17, "int8")


def llama_8b() -> ModelConfig:
    """Return the config of Llama 3 8B's shape."""
    sizes = {"vocab_size": 128_256, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    kinds = {"mlp_size": 14_336, "num_layers": 32, "rope_theta": 5e5, "tie_embeddings": False}
    return ModelConfig.from_dict(shape_config("llama-3.2-1b").to_dict() | sizes | kinds)


@dataclass(frozen=True, slots=True)
class Step:
    """Decode step of a batch at a context length on a card; times in microseconds."""

    num_bytes: int
    num_kernels: int
    num_dependent: int
    bytes_per_second: float

    @property
    def bound_us(self) -> float:
        """Lower bound of the step's time: all bytes are read at the card's full bandwidth."""
        return 1e6 * self.num_bytes / self.bytes_per_second

    @property
    def device_us(self) -> float:
        """Time of the device for the step, if it never waits for the host."""
        ramps_us = (self.num_kernels - self.num_dependent) * _RAMP_US
        return self.bound_us / _SHARE + self.num_kernels * _GAP_US + ramps_us

    @property
    def host_us(self) -> float:
        """Time of the host to launch all kernels one by one, without a CUDA graph."""
        return self.num_kernels * _LAUNCH_US

    @property
    def graph_gain(self) -> float:
        """Factor by which a CUDA graph shortens the step, if the next step is launched ahead."""
        return max(1.0, self.host_us / self.device_us)


def decode_step(config: ModelConfig, card: str, batch_size: int, layer: Layer = FUSED, *, context: int = 1024) -> Step:
    """Return the step of a batch of sequences of `context` tokens each."""
    formula = WorkFormula(config, layer.weight_type, 2)
    return Step(
        num_bytes=formula.decode(batch_size=batch_size, context_length=context).bytes,
        num_kernels=config.num_layers * layer.num_kernels + _OTHER_KERNELS,
        num_dependent=config.num_layers * layer.num_dependent,
        bytes_per_second=BANDWIDTHS[card],
    )


def model_table(config: ModelConfig, card: str) -> str:
    """Return a Markdown table of decode steps by batch size."""
    lines = [
        "| sequences | GB | kernels | bound, µs | device, µs | share of the bound | host without graph, µs "
        "| gain of graphs | gain of fused kernels |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for batch in BATCHES:
        step, plain = (decode_step(config, card, batch, layer) for layer in (FUSED, UNFUSED))
        lines.append(
            f"| {batch} | {step.num_bytes / 1e9:.2f} | {step.num_kernels} | {step.bound_us:.0f} | {step.device_us:.0f} "
            f"| {step.bound_us / step.device_us:.0%} | {step.host_us:.0f} | {step.graph_gain:.2f}x "
            f"| {plain.device_us / step.device_us:.2f}x |"
        )
    return "\n".join(lines) + "\n"
