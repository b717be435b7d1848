"""From settings and a checkpoint to an engine: what "auto" means on this machine. Imports torch."""

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from model.attention.interface import ATTENTION_BACKENDS
from model.checkpoint import load_model
from model.config import ModelConfig
from model.manifest import Manifest
from model.tokenizer.files import load_tokenizer
from service.engine.config import EngineConfig
from service.engine.engine import Engine
from service.settings import ModelSettings, usable_cpus

_MB = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
# Room for prefixes of ended sequences, as a share of what the running ones can need.
_PREFIX_CACHE_SHARE = 0.5
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What "auto" came to."""

    device: str
    dtype: str
    threads: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int

    def __str__(self) -> str:
        return (
            f"device {self.device}, {self.dtype}, {self.threads} threads, KV-cache of {self.num_blocks} blocks of "
            f"{self.block_size} tokens ({self.kv_cache_bytes / _MB:.0f} MB)"
        )


def build_engine(settings: ModelSettings, manifest: Manifest) -> tuple[Engine, EngineFacts]:
    """Load the model and make the engine around it.

    Raises:
        CheckpointError: the tensors cannot be read.
        ValueError: the device is not there, or the KV-cache is too small for one full context.
        torch.OutOfMemoryError, RuntimeError: the device cannot hold it.
    """
    _keep_freed_memory()
    threads = _num_threads() if settings.threads == "auto" else settings.threads
    torch.set_num_threads(threads)
    device = _device(settings.device)
    dtype_name = settings.dtype
    if dtype_name == "auto":
        # float32 on CPU: there a row's result does not depend on the batch around it.
        dtype_name = "bfloat16" if device == "cuda" else "float32"
    dtype = _DTYPES[dtype_name]
    model = load_model(manifest, device=device, dtype=dtype, attention=ATTENTION_BACKENDS[settings.attention])
    num_blocks = _num_blocks(settings, manifest.config, dtype.itemsize, device)
    config = EngineConfig(
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_num_running=settings.max_num_running,
        max_batched_tokens=settings.max_batched_tokens,
        enable_prefix_cache=settings.enable_prefix_cache,
    )
    engine = Engine(model, load_tokenizer(manifest.directory), config)
    facts = EngineFacts(
        device=device,
        dtype=dtype_name,
        threads=threads,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        kv_cache_bytes=num_blocks * settings.block_size * manifest.config.kv_bytes_per_token(dtype.itemsize),
    )
    return engine, facts


def _num_threads() -> int:
    """One less than the CPUs we may use: the last one is for the API process and the neighbours.

    OpenMP's threads spin while they wait for each other, so that one that shares its CPU stops all the others. On 2
    CPUs, with the default model: 2 threads make 140, 1,620 and 2,490 tokens/s for 1, 16 and 64 streams on a quiet
    machine and 2 to 50 for one beside a busy process; 1 thread makes 150, 1,480 and 1,960, and 180 to 230.
    """
    return max(1, usable_cpus() - 1)


def _keep_freed_memory() -> None:
    """Let the allocator reuse what a step frees instead of giving it back to the kernel.

    glibc maps every large block anew and unmaps it when it is freed, and each first touch of a page is a fault. A step
    frees what the next one wants again: with 64 sequences it takes half the time (measured: 27 ms instead of 54).
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _device(wanted: str) -> str:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValueError("--device cuda: no CUDA device can be used here")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and has_cuda) else "cpu"


def _num_blocks(settings: ModelSettings, config: ModelConfig, bytes_per_value: int, device: str) -> int:
    """Blocks of the pool: what was asked for, or what can be of use, within half of what memory is free."""
    block_bytes = settings.block_size * config.kv_bytes_per_token(bytes_per_value)
    blocks_per_context = -(-config.max_context_length // settings.block_size)
    if settings.kv_cache_memory == "auto":
        useful = round(settings.max_num_running * blocks_per_context * (1 + _PREFIX_CACHE_SHARE))
        return max(blocks_per_context, min(useful, _free_bytes(device) // 2 // block_bytes))
    num_blocks = settings.kv_cache_memory * _MB // block_bytes
    if num_blocks < blocks_per_context:
        needed = -(-blocks_per_context * block_bytes // _MB)
        raise ValueError(
            f"--kv-cache-memory {settings.kv_cache_memory} holds {num_blocks * settings.block_size} tokens, less "
            f"than the context of {config.max_context_length}: at least {needed} is needed"
        )
    if (free := _free_bytes(device)) < settings.kv_cache_memory * _MB:
        raise ValueError(f"--kv-cache-memory {settings.kv_cache_memory}: only {free // _MB} MB are free")
    return num_blocks


def _free_bytes(device: str) -> int:
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
