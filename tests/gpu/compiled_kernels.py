"""The project's Triton kernels, compiled ahead of time for GPUs that this machine does not have. Needs triton.

The launches come from the model's own decode and prompt steps, run on PyTorch's meta device: tensors there have shapes
and strides, and no memory. Triton compiles each different launch with its own ptxas. Registers, spills and shared
memory are read from the machine code.
"""

import contextlib
import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from model.attention import triton_decode
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.paged import PagedAttention
from model.config import ModelConfig
from model.gpu import quantized_kernels
from model.gpu.fused_modules import fuse
from model.gpu.quantization import Quantization
from model.gpu.sampling_kernels import complete_floors, masked
from model.nn.linear import replace_linears
from model.nn.transformer import Transformer

# Shared memory that a block may have, in bytes, by compute capability (CUDA C++ programming guide, technical
# specifications per compute capability): A100, L4 and RTX 40, H100 and H200, B200.
SHARED_BYTES: Final = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
_REGISTERS = 65_536  # of a block
_THREADS = 32  # of a warp
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_META = torch.device("meta")


@dataclass(frozen=True)
class _Pointer:
    """Stand-in for a tensor in a launch: Triton reads its dtype, and whether its address is a multiple of 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel launch of a model's step: what Triton needs to compile the kernel. case: the step that launched it."""

    kernel: JITFunction[Any]
    case: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel, with the dtype and, for attention, the size of a head: a row of docs/gpu.md."""
        kernel, dtype = self.kernel.fn.__name__.lstrip("_"), self.case.split()[-1]
        if dtype in ("int8", "fp8", "int8-cache"):
            dtype = f"bfloat16 {dtype}"
        return f"`{kernel}` {dtype}" + (f", heads of {self.arguments['SIZE']}" if "splits" in kernel else "")

    @property
    def tile_size(self) -> int:
        """Product of the sizes of the kernel's tiles."""
        return math.prod(self.arguments.get(name, 1) for name in ("ROWS", "PADDED", "TILE", "OUTPUTS", "INPUTS"))

    @property
    def key(self) -> str:
        """Text that is the same for launches that share compiled code."""
        parts = []
        names = {parameter.name: parameter for parameter in self.kernel.params}
        for name, value in self.arguments.items():
            parameter = names.get(name)
            if isinstance(value, _Pointer):
                text = f"{value.dtype} {value.address % 16 == 0}"
            elif parameter is None or parameter.is_constexpr or not isinstance(value, int):
                text = str(value)  # constants and options such as num_warps
            elif parameter.do_not_specialize:
                text = "integer"
            else:
                text = "1" if value == 1 else f"{value % 16 == 0} {value >= 2**31}"
            parts.append(f"{name}: {text}")
        return f"{self.kernel.fn.__name__}({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """Resources that a compiled kernel needs. spilled_bytes: local memory per thread, for values without a register."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int

    def problems(self, capability: int) -> list[str]:
        """Return why a GPU of this compute capability runs the kernel slowly, or not at all."""
        found = []
        if self.spilled_bytes:
            found.append(f"{self.spilled_bytes} bytes of spilled registers")
        if self.shared_bytes > SHARED_BYTES[capability]:
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if self.registers * self.num_warps * _THREADS > _REGISTERS:
            found.append(f"{self.registers} registers in {self.num_warps} warps")
        return found


class _Driver:
    """Stand-in for Triton's driver, as if there were one GPU of a compute capability."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, _THREADS)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


def compile_for(launch: Launch, capability: int) -> MachineCode:
    """Compile a launch's kernel for GPUs of a compute capability, 90 for 9.0. Raises what Triton raises."""
    before = driver._active
    driver.set_active(_Driver(capability))
    # As `model.system.dependent_launch` decides on a GPU.
    is_dependent = dict.fromkeys(("launch_pdl", "IS_DEPENDENT"), capability >= 90)
    try:
        kernel = launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments | is_dependent)
    finally:
        driver.set_active(before)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    accesses = re.search("griddepcontrol.wait|(ld|st).global|cp.async", kernel.asm["ptx"])
    assert accesses is not None
    assert capability < 90 or accesses[0] == "griddepcontrol.wait", "memory is used before the kernel waits"
    return MachineCode(
        registers=int(found[1]),
        spilled_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
    )


@contextlib.contextmanager
def _recorded(case: list[str], into: list[Launch]) -> Iterator[None]:
    """Record kernel launches in `into` instead of running them. case[-1]: the step that launches them."""

    def record(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip((parameter.name for parameter in self.params), args, strict=False)) | kwargs
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert value.device == _META, f"{self.fn.__name__}: {name} is on {value.device}"
                given[name] = _Pointer(value.dtype, 256 + int(value.storage_offset()) * value.itemsize)
        into.append(Launch(kernel=self, case=case[-1], grid=tuple(grid), arguments=given))

    run, JITFunction.run = JITFunction.run, record  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def _config(**changes: Any) -> ModelConfig:
    """Return the config of one layer of Qwen2 1.5B, with changes."""
    sizes = {"vocab_size": 151_936, "hidden_size": 1536, "num_heads": 12, "num_kv_heads": 2, "head_dim": 128}
    kinds = {"position": "rotary", "rope_theta": 1e6, "norm": "rms_norm", "norm_eps": 1e-6, "mlp": "swiglu"}
    flags = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}
    whole = {**sizes, **kinds, **flags, "tie_embeddings": True, "mlp_size": 8960, "num_layers": 1}
    return ModelConfig.from_dict({**whole, "max_context_length": 32_768, **changes})


_HEADS = {"attention_bias": False, "qk_norm": True}
# Models whose steps are compiled, with the dtypes and quantizations of each: the shapes that people serve on GPUs.
_CASES: Final = {
    "Qwen2 1.5B": (_config(), ("bfloat16", "float16", "bfloat16 int8", "bfloat16 fp8")),
    "Llama 3 8B": (
        _config(hidden_size=4096, num_heads=32, num_kv_heads=8, mlp_size=14_336, attention_bias=False),
        ("bfloat16", "bfloat16 int8", "bfloat16 int8-cache"),
    ),
    "kvasir-20m": (
        _config(hidden_size=320, num_heads=5, num_kv_heads=1, head_dim=64, mlp_size=1792, vocab_size=8192, **_HEADS),
        ("bfloat16", "float32"),
    ),
    "Gemma 2B": (
        _config(
            hidden_size=2048, num_heads=8, num_kv_heads=1, head_dim=256, mlp_size=16_384, mlp="geglu",
            norm_unit_offset=True, attention_bias=False,
        ),
        ("bfloat16", "float32"),
    ),
    "Phi-2": (
        _config(hidden_size=2560, num_heads=32, num_kv_heads=32, head_dim=80, rotary_dim=32, norm="layer_norm"),
        ("bfloat16",),
    ),
    "Qwen2 1.5B, window": (_config(sliding_window=4096), ("bfloat16", "float32")),
}  # fmt: skip
_ROWS, _PROMPTS = (4, 64), (512,)


@torch.inference_mode()
def launches() -> list[Launch]:
    """Return the different kernel launches of decode and prompt steps of all models in `_CASES`."""
    found: list[Launch] = []
    case = [""]
    with _recorded(case, found):
        for name, (config, forms) in _CASES.items():
            for form in forms:
                dtype, _, extra = form.partition(" ")
                case.append(f"{name} {form}")
                _run_steps(*_make(config, getattr(torch, dtype), extra))
        numbers = torch.zeros((3, 64, 1), device=_META)
        case.append("sampling float32")
        logits_BV, mask_of_B = (
            torch.zeros((64, 151_936), device=_META),
            torch.zeros(64, dtype=torch.int64, device=_META),
        )
        complete_floors(logits_BV, *numbers[1:])
        masked(logits_BV, mask_of_B, torch.zeros((64, 4748), dtype=torch.int32, device=_META))
    return list({launch.key: launch for launch in reversed(found)}.values())


def _make(config: ModelConfig, dtype: torch.dtype, extra: str) -> tuple[Transformer, KVCache]:
    """Return a model and its KV-cache on the meta device. extra: int8 or fp8 matrices, or an int8-cache."""
    attention = PagedAttention(triton_decode.attend, lambda q_XHD, *_: torch.empty_like(q_XHD))
    with _META:
        model = Transformer(config, attention).to(dtype).eval()
    if extra in ("int8", "fp8"):
        replace_linears(model, Quantization(extra, quantized_kernels).make)
    fuse(model)
    _to_meta(model)
    cache_dtype = torch.int8 if extra == "int8-cache" else None
    cache = KVCache(config, num_blocks=9, block_size=16, dtype=dtype, device=_META, cache_dtype=cache_dtype)
    return model, cache


def largest(found: Iterable[Launch]) -> list[Launch]:
    """Return, of the launches of each name, the one with the largest tiles."""
    by_size = sorted(found, key=lambda launch: launch.tile_size)
    return list({launch.name: launch for launch in by_size}.values())


def _run_steps(model: Transformer, cache: KVCache) -> None:
    """Run decode and prompt steps."""
    for rows in _ROWS:
        # Slices of one tensor, as the static inputs of CUDA graphs are.
        ids, positions, slots = torch.zeros(rows * 3, dtype=torch.int64, device=_META).split(rows)
        metadata = AttentionMetadata(
            query_lengths=(1,) * rows,
            context_lengths=(1,) * rows,
            positions_T=positions,
            slot_mapping_T=slots,
            block_tables_BN=torch.zeros((rows, 64), dtype=torch.int32, device=_META),
        )
        model.logits(model.hidden(ids, metadata, cache))
    for length in _PROMPTS:
        ids, positions, slots = torch.zeros(length * 3, dtype=torch.int64, device=_META).split(length)
        metadata = AttentionMetadata(
            query_lengths=(length,),
            context_lengths=(length,),
            positions_T=positions,
            slot_mapping_T=slots,
            block_tables_BN=torch.zeros((1, 64), dtype=torch.int32, device=_META),
        )
        model.logits(model.hidden(ids, metadata, cache)[-1:])


def _to_meta(model: nn.Module) -> None:
    """Move tensors to the meta device that modules have made on the CPU."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(_META)
