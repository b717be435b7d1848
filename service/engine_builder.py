"""From settings and a checkpoint to an engine: what "auto" means on this machine. Imports torch."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from model.attention.ways import Place
from model.checkpoint import load_model
from model.eight_bits import EightBits
from model.kernels.loading import KERNELS
from model.linear import can_pack, replace_each, replace_linears
from model.manifest import Manifest
from model.native_transformer import kernels_for
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from model.transformer import Transformer
from service.engine.accelerated import (
    Attending,
    attention_for,
    cache_bytes,
    capture_for,
    eight_bits_for,
    fuse_for_gpu,
    recorded_runner,
)
from service.engine.config import EngineConfig
from service.engine.engine import Engine
from service.engine.memory import LargestStep
from service.serving_path import attention_in_words
from service.settings import ModelSettings, SettingsError, context_length, model_threads, usable_cpus

_MIB = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
# Room for prefixes of ended sequences, as a share of what the running ones can need.
_PREFIX_CACHE_SHARE = 0.5
# Tokens beyond which not every running sequence gets: 64 contexts of 131,072 tokens are room that nothing ever fills.
_USUAL_LENGTH = 8192
# Of free memory, for one context that is too long for half of it.
_MOST_OF_MEMORY = 0.8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What "auto" came to. `matrices`: plain, packed, int8 or fp8, see `model.linear`, `model.eight_bits`.

    takes_kernels: kernels of our own compute every step whole, once they are loaded.
    """

    device: str
    attention: str
    takes_kernels: bool
    dtype: str
    matrices: str
    threads: int
    max_context_length: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    kv_cache_dtype: str

    def __str__(self) -> str:
        return (
            f"device {self.device}, {self.dtype}, {self.matrices} matrices, "
            f"{self.threads} {'thread' if self.threads == 1 else 'threads'}, "
            f"context {self.max_context_length}, {self.kv_cache}"
        )

    @property
    def kv_cache(self) -> str:
        """The KV-cache's size in words."""
        size = f"{self.kv_cache_bytes / _MIB:.4g} MiB of {self.kv_cache_dtype}"
        return f"KV-cache of {self.num_blocks} blocks of {self.block_size} tokens ({size})"

    def found(self) -> dict[str, object]:
        """What the settings' "auto" came to, by setting, as of now."""
        return {
            "device": self.device,
            "attention": attention_in_words(self.attention, KERNELS if self.takes_kernels else None),
            "dtype": self.dtype,
            "matrices": self.matrices,
            "threads": self.threads,
            "max_context_length": self.max_context_length,
            "kv_cache_memory": self.kv_cache,
            "kv_cache_dtype": self.kv_cache_dtype,
        }


def build_engine(
    settings: ModelSettings, manifest: Manifest, *, wait_for_kernels: bool = True
) -> tuple[Engine, EngineFacts]:
    """Load the model and make the engine around it.

    Args:
        wait_for_kernels: that have to be compiled first, for seconds; else PyTorch's serve until then.

    Raises:
        CheckpointError: the tensors cannot be read.
        SettingsError: a longer context was asked for than the model has, a device that is not there or has no such
            eight-bit products or attention, a KV-cache too small for one full context, or of a dtype that is not for
            this model.
        ValueError: the memory is too small for that.
        torch.OutOfMemoryError, RuntimeError: the device cannot hold it.
    """
    keep_freed_memory()
    max_context_length = context_length(settings, manifest.config)
    threads = model_threads(settings)
    torch.set_num_threads(threads)
    device = find_device(settings.device)
    dtype_name = _find_dtype(settings.dtype, device)
    dtype = _DTYPES[dtype_name]
    held_as = find_cache_dtype(settings.kv_cache_dtype, device, dtype)
    eight_bits = find_eight_bits(settings.quantize, device, dtype)
    place = Place(config=manifest.config, device=torch.device(device), dtype=dtype, block_size=settings.block_size)
    attending = _attend(settings, place, wait_for_kernels)
    packs = device == "cpu" and _matrix_kind(settings.quantize, device, dtype) != "plain"
    model = load_model(manifest, device=device, dtype=dtype, attention=attending.backend, packs_next=packs)
    matrices = prepare_matrices(model, settings.quantize, eight_bits)
    fuse_for_gpu(model)
    block_bytes = settings.block_size * manifest.config.kv_bytes_per_token(held_as.itemsize)
    largest, records = _largest_step(settings, max_context_length), settings.cuda_graphs and attending.recordable
    usable = cache_bytes(model, largest, settings.gpu_memory_share, records=records)
    # What our own kernels pack later is not there yet; nor is it free.
    packed = 0 if kernels_for(model) is None else manifest.config.num_parameters * dtype.itemsize
    free = max(0, free_bytes(device) - packed) if usable is None else usable
    num_blocks = _num_blocks(settings, max_context_length, block_bytes, free, is_shared=usable is None)
    config = _engine_config(settings, num_blocks, max_context_length)
    engine = _make_engine(model, load_tokenizer(manifest.directory), config, attending, settings)
    facts = EngineFacts(
        device=device,
        attention=attending.name,
        takes_kernels=kernels_for(model) is not None,
        dtype=dtype_name,
        matrices=matrices,
        threads=threads,
        max_context_length=max_context_length,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        kv_cache_bytes=num_blocks * block_bytes,
        kv_cache_dtype=str(held_as).removeprefix("torch."),
    )
    return engine, facts


def _engine_config(settings: ModelSettings, num_blocks: int, max_context_length: int) -> EngineConfig:
    return EngineConfig(
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_num_running=settings.max_num_running,
        max_batched_tokens=settings.max_batched_tokens,
        max_draft_tokens=settings.speculative_tokens,
        prompt_slowdown=settings.prompt_slowdown,
        enable_prefix_cache=settings.enable_prefix_cache,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_context_length=max_context_length,
    )


def _largest_step(settings: ModelSettings, max_context_length: int) -> LargestStep:
    """What a step may hold by these settings."""
    return LargestStep(
        block_size=settings.block_size,
        num_tokens=settings.max_batched_tokens,
        num_draws=settings.max_num_running,
        max_context_length=max_context_length,
    )


def _make_engine(
    model: Transformer, tokenizer: Tokenizer, config: EngineConfig, attending: Attending, settings: ModelSettings
) -> Engine:
    """The engine; on a GPU its decode steps are recorded, where its attention can be, and launched ahead."""
    looks_ahead = None if settings.lookahead else False
    capture = None
    if settings.cuda_graphs and attending.recordable:
        capture = capture_for(model.token_embedding.weight.device)
    if capture is None:
        return Engine(model, tokenizer, config, looks_ahead=looks_ahead)
    runner = recorded_runner(model, config, tokenizer.vocab_size, capture)
    return Engine(model, tokenizer, config, runner=runner, looks_ahead=looks_ahead)


def _find_dtype(wanted: str, device: str) -> str:
    """What a --dtype setting means on this device.

    float32 on CPU: there a row's result does not depend on the batch around it, but for rounding.
    """
    return ("bfloat16" if device == "cuda" else "float32") if wanted == "auto" else wanted


def _attend(settings: ModelSettings, place: Place, wait_for_kernels: bool) -> Attending:
    """The backend that was asked for; kernels of our own are loaded, or compiled, for the one that takes them."""
    try:
        attending = attention_for(settings.attention, place)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if attending.name == "native":
        KERNELS.prepare(settings.cache_dir, wait=wait_for_kernels)
    return attending


def prepare_matrices(model: Transformer, quantize: str, eight_bits: EightBits | None) -> str:
    """Make a loaded model's matrices what is fastest here, or what was asked for; which kind that is.

    Kernels of our own that are loaded already pack them themselves, at the first step.
    """
    weight = model.token_embedding.weight
    kind = _matrix_kind(quantize, weight.device, weight.dtype)
    kernels = kernels_for(model)
    if eight_bits is not None:
        replace_each(model, eight_bits.make)
    elif kind == "int8" or (kind == "packed" and (kernels is None or kernels.loaded is None)):
        replace_linears(model, kind)
    return kind


def _matrix_kind(quantize: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """What a loaded model's matrices become."""
    if quantize != "none":
        return quantize
    return "packed" if can_pack(device, dtype) else "plain"


def keep_freed_memory() -> None:
    """Let the allocator reuse what a step frees instead of giving it back to the kernel.

    glibc maps every large block anew and unmaps it when it is freed, and each first touch of a page is a fault. A step
    frees what the next one wants again: with 64 sequences it takes half the time (measured: 27 ms instead of 54).
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def all_threads(settings: ModelSettings) -> Iterator[None]:
    """While nobody is served, and matrices are packed: no CPU need be left to others, unless so many were asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus() if settings.threads == "auto" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def find_device(wanted: str) -> str:
    """What a --device setting means here. Raises SettingsError: there is no such device."""
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise SettingsError("--device cuda: no CUDA device can be used here")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and has_cuda) else "cpu"


def find_cache_dtype(wanted: str, device: str, dtype: torch.dtype) -> torch.dtype:
    """What a --kv-cache-dtype setting means for a model of this dtype. Raises SettingsError: it is not for it."""
    if wanted == "auto":
        return dtype
    if device != "cpu" or dtype is not torch.float32:
        model = f"{str(dtype).removeprefix('torch.')} on {'CUDA' if device == 'cuda' else 'the CPU'}"
        raise SettingsError(
            f"--kv-cache-dtype {wanted}: for float32 models on the CPU, and this one is {model}; leave it out, or give "
            "--device cpu --dtype float32"
        )
    return torch.float16


def find_eight_bits(quantize: str, device: str, dtype: torch.dtype) -> EightBits | None:
    """What a --quantize setting means on a GPU; None elsewhere. Raises SettingsError: it has no such products."""
    try:
        return eight_bits_for(quantize, torch.device(device), dtype)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _num_blocks(
    settings: ModelSettings, max_context_length: int, block_bytes: int, free: int, *, is_shared: bool
) -> int:
    """Blocks of the pool: what was asked for, or what can be of use, within the `free` bytes of memory.

    Args:
        is_shared: half of the memory is for everything else, as on a machine; a GPU's has been divided before.

    Raises:
        SettingsError: one sequence at full length is more than was asked for; says what would do.
        ValueError: it is more than there is.
    """
    blocks_per_context = -(-max_context_length // settings.block_size)
    needed_mib = -(-blocks_per_context * block_bytes // _MIB)
    # One sequence may have nearly all, rather than none being served.
    most, usual_share = (int(free * _MOST_OF_MEMORY), free // 2) if is_shared else (free, free)
    if settings.kv_cache_memory == "auto":
        if blocks_per_context * block_bytes > most:
            fitting = most // block_bytes * settings.block_size
            raise ValueError(
                f"a context of {max_context_length} tokens needs {needed_mib} MiB of KV-cache, and {free // _MIB} MiB "
                f"of memory are free: {_shorter(fitting)}"
            )
        usual = min(blocks_per_context, -(-_USUAL_LENGTH // settings.block_size))
        useful = round(settings.max_num_running * usual * (1 + _PREFIX_CACHE_SHARE))
        return max(blocks_per_context, min(useful, usual_share // block_bytes))
    num_blocks = settings.kv_cache_memory * _MIB // block_bytes
    if free < settings.kv_cache_memory * _MIB:
        raise ValueError(f"--kv-cache-memory {settings.kv_cache_memory}: only {free // _MIB} MiB are free")
    if num_blocks < blocks_per_context:
        raise SettingsError(
            f"--kv-cache-memory {settings.kv_cache_memory} holds {num_blocks * settings.block_size} tokens, less "
            f"than the context of {max_context_length}: give it {needed_mib}, or "
            f"{_shorter(num_blocks * settings.block_size)}"
        )
    return num_blocks


def _shorter(fitting: int) -> str:
    """What to do about a context that does not fit, where `fitting` tokens do."""
    return f"serve --max-context-length {fitting}" if fitting else "take a smaller model or --block-size"


def free_bytes(device: str) -> int:
    """Memory that can be had: the device's, or the machine's within the limit of our control group (v2)."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))
