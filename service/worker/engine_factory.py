"""Build an engine from settings and a checkpoint, with "auto" settings resolved for this machine. Imports torch."""

import ctypes
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from model.attention.paged import KernelContext
from model.checkpoint.decoding import quantized_bytes
from model.checkpoint.loading import EMBEDDING, MATRICES, load_model
from model.checkpoint.lora_adapter import read_adapter
from model.checkpoint.manifest import Manifest
from model.gguf.container import is_gguf
from model.gpu.fused_modules import fuse
from model.gpu.quantization import Quantization
from model.kernels.build import BuildError, levels_here
from model.kernels.kernel_library import KernelLibrary, load_kernels
from model.native.native_transformer import NativeTransformer, computes, enlarge_pages, library_for, to_native
from model.nn.linear import LINEAR_KINDS, GroupedLinear, Int8Linear, can_pack, replace_linears
from model.nn.matrix_kinds import INT4_TEXT, QUANTIZED_BYTES, matrix_kind
from model.nn.transformer import Transformer
from model.system.limits import available_memory_bytes, usable_cpus
from model.tokenizer.files import load_tokenizer
from model.tokenizer.interface import Tokenizer
from service.config.settings import ModelSettings, SettingsError, context_length
from service.engine.engine import Engine
from service.engine.execution.gpu_setup import (
    AttentionChoice,
    LargestStep,
    cache_bytes,
    capture_for,
    choose_attention,
    choose_quantization,
    wait_for_device_memory,
)
from service.engine.scheduling.scheduler import EngineConfig
from service.worker.devices import find_device, take_device
from service.worker.fallbacks import find_fallbacks
from service.worker.memory_plan import CACHE_SHARE, LoadedModel, MemoryPlan, ServerNeeds, plan_memory

logger = logging.getLogger(__name__)

_MIB = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
# KV-cache for prefixes of ended sequences, as a share of the KV-cache that running sequences can need.
_PREFIX_CACHE_SHARE = 0.5
# Tokens per running sequence that "auto" sizes the KV-cache for: 64 contexts of 131,072 tokens would never be used.
_USUAL_LENGTH = 8192
# Dtypes by their names in safetensors files, and by their names in settings.
_STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Settings that a built engine runs with, each "auto" replaced by the chosen value."""

    device: str
    attention: str  # native, paged (with its parts), sdpa or eager
    kernel_level: str | None  # instruction level of the native kernels, if they compute every step whole
    dtype: str
    matrices: str  # plain, packed, int8, int4 or fp8, see `model.nn.linear`, `model.gpu.quantization`
    threads: int
    max_context_length: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    kv_cache_dtype: str
    reasons: Mapping[str, str]  # reasons for chosen values, by the setting's name
    has_standby: bool = True  # a standby worker is wanted and fits into memory
    fallbacks: tuple[str, ...] = ()  # faster paths that are not available, each with the reason

    def __str__(self) -> str:
        stored = f" ({self.reasons['matrices']})" if "matrices" in self.reasons else ""
        return (
            f"device {self.device}, {self.dtype}, {self.matrices} matrices{stored}, "
            f"{self.threads} {'thread' if self.threads == 1 else 'threads'}, "
            f"context {self.max_context_length}, {self.kv_cache}"
        )

    @property
    def kv_cache(self) -> str:
        """Size of the KV-cache as text: blocks, MiB and dtype."""
        size = f"{self.kv_cache_bytes / _MIB:.4g} MiB of {self.kv_cache_dtype}"
        return f"KV-cache of {self.num_blocks} blocks of {self.block_size} tokens ({size})"

    def setting_values(self) -> dict[str, object]:
        """Return what the listing of settings at start-up shows of the engine, by name.

        These are effective values of settings, such as those given as "auto", and the format of the matrices. Some
        values end with the reason of the choice.
        """
        values: dict[str, object] = {
            "device": self.device,
            "attention": self.attention if self.kernel_level is None else f"{self.attention} ({self.kernel_level})",
            "dtype": self.dtype,
            "matrices": self.matrices,
            "threads": self.threads,
            "max_context_length": self.max_context_length,
            "kv_cache_memory": self.kv_cache,
            "kv_cache_dtype": self.kv_cache_dtype,
            "fallbacks": "; ".join(self.fallbacks) or "none",
        }
        return values | {name: f"{values[name]} ({reason})" for name, reason in self.reasons.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineForecast:
    """Engine that a new process on this machine would build now, known from the headers of the checkpoint's files.

    facts: facts of that engine. On a GPU, `num_blocks` is an estimate: the largest step is not run to measure memory.
    weight_bytes: size of the weights as they are served.
    cache_bytes_per_token: KV-cache of one token, over all layers.
    """

    facts: EngineFacts
    weight_bytes: int
    cache_bytes_per_token: int


class _ResolvedSettings(NamedTuple):
    """Engine settings with "auto" replaced by chosen values, as far as possible before the model is loaded."""

    context: KernelContext
    kernels: KernelLibrary | None  # None if PyTorch's kernels compute the model
    attending: AttentionChoice
    cache_dtype: torch.dtype
    quantization: Quantization | None
    packed_next: tuple[str, ...]  # matrices that are not copied from the file before they are packed, see `load_model`
    threads: int
    max_context_length: int
    reasons: Mapping[str, str]
    fallbacks: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV-cache block, over all layers."""
        return self.context.block_size * self.context.config.kv_bytes_per_token(self.cache_dtype.itemsize)


def build_engine(
    settings: ModelSettings,
    manifest: Manifest,
    *,
    server: ServerNeeds | None = None,
    get_tokenizer: Callable[[], Tokenizer] | None = None,
) -> tuple[Engine, EngineFacts]:
    """Load the model and build its engine. Native kernels are compiled first if they are missing.

    Args:
        server: facts about the server around this engine; None outside a server, such as for batch completion.
        get_tokenizer: returns the checkpoint's tokenizer, called when the model is loaded; None: load the tokenizer.

    Raises:
        CheckpointError: the tensors cannot be read.
        SettingsError: a setting does not fit the model, the device or another setting.
        ValueError: the memory is too small for the requested settings.
        torch.OutOfMemoryError, RuntimeError: the model or the KV-cache does not fit on the device.
    """
    keep_freed_memory()
    manifest = _as_served(settings, manifest)
    if server is not None and server.num_workers > 1:
        settings = take_device(settings, server)
    resolved = _resolve(settings, manifest)
    torch.set_num_threads(resolved.threads)
    for fallback in resolved.fallbacks:
        logger.warning("a slower path is used, because a faster one is not available: %s", fallback)
    device, dtype = resolved.context.device, resolved.context.dtype
    plan = _plan(server, settings, manifest, resolved)
    num_blocks, num_workers = (0, 1) if server is None else (server.num_blocks, server.num_workers)
    if num_blocks and device.type != "cpu":
        needed = manifest.config.num_parameters * (dtype.itemsize if settings.quantize == "none" else 1)
        wait_for_device_memory(needed + num_blocks * resolved.block_bytes, partial(free_bytes, device.type))
    loaded = load_model(
        manifest, device=device, dtype=dtype, attention=resolved.attending.backend, packed_next=resolved.packed_next
    )
    matrices = prepare_matrices(loaded, settings.quantize, resolved.quantization)
    if device.type == "cuda":
        fuse(loaded)
    model = to_native(loaded)
    tokenizer = load_tokenizer(manifest.directory) if get_tokenizer is None else get_tokenizer()
    capture = capture_for(device) if settings.cuda_graphs and resolved.attending.can_capture else None
    if not num_blocks:
        profiled_bytes = cache_bytes(loaded, _largest_step(settings, resolved), settings.gpu_memory_share, capture)
        num_blocks = _num_blocks(settings, resolved, plan.reserved_bytes, profiled_bytes, num_workers)
    engine = Engine(
        *(model, tokenizer, _engine_config(settings, num_blocks, resolved.max_context_length)),
        capture=capture,
        looks_ahead=None if settings.lookahead else False,
        read_adapter=partial(read_adapter, manifest=manifest),
    )
    enlarge_pages(model)  # not earlier: it would slow down what the start still does
    return engine, _facts(
        resolved,
        manifest,
        kernel_level=model.kernel_level if isinstance(model, NativeTransformer) else None,
        matrices=matrices,
        num_blocks=num_blocks,
        has_standby=plan.has_standby,
    )


def forecast_engine(settings: ModelSettings, manifest: Manifest, *, server: ServerNeeds) -> EngineForecast:
    """Return what `build_engine` would build, without reading a weight. Raises the same errors.

    Native kernels are compiled if they are missing, as `build_engine` does.
    """
    manifest = _for_context(settings, manifest)
    resolved = _resolve(settings, manifest)
    weight_bytes = _served_bytes(settings, manifest, resolved)
    plan = _plan(server, settings, manifest, resolved)
    device, profiled_bytes = resolved.context.device.type, None
    if device != "cpu":
        profiled_bytes = max(0, int(free_bytes(device) * settings.gpu_memory_share) - weight_bytes)
    kind = _matrix_kind(settings.quantize, device, resolved.context.dtype)
    if manifest.num_quantized and device == "cpu" and manifest.quantization is not None:
        kind = manifest.quantization.text[:4]
    elif settings.quantize == "none" and resolved.kernels is not None:
        kind = "packed"
    return EngineForecast(
        facts=_facts(
            resolved,
            manifest,
            kernel_level=None if resolved.kernels is None else resolved.kernels.level,
            matrices=kind,
            num_blocks=_num_blocks(settings, resolved, plan.reserved_bytes + weight_bytes, profiled_bytes),
            has_standby=plan.has_standby,
        ),
        weight_bytes=weight_bytes,
        cache_bytes_per_token=resolved.block_bytes // settings.block_size,
    )


def _facts(
    resolved: _ResolvedSettings,
    manifest: Manifest,
    *,
    kernel_level: str | None,
    matrices: str,
    num_blocks: int,
    has_standby: bool,
) -> EngineFacts:
    return EngineFacts(
        device=str(resolved.context.device),
        attention=resolved.attending.name,
        kernel_level=kernel_level,
        dtype=_name(resolved.context.dtype),
        matrices=matrices,
        threads=resolved.threads,
        max_context_length=resolved.max_context_length,
        num_blocks=num_blocks,
        block_size=resolved.context.block_size,
        kv_cache_bytes=num_blocks * resolved.block_bytes,
        kv_cache_dtype=_name(resolved.cache_dtype),
        reasons={**resolved.reasons, **_stored_format(manifest, matrices)},
        has_standby=has_standby,
        fallbacks=resolved.fallbacks,
    )


def _engine_config(settings: ModelSettings, num_blocks: int, max_context_length: int) -> EngineConfig:
    return EngineConfig(
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_num_running=settings.max_num_running,
        max_batched_tokens=settings.max_batched_tokens,
        max_draft_tokens=settings.speculative_tokens,
        prompt_slowdown=settings.prompt_slowdown,
        target_itl_seconds=settings.target_itl_ms / 1000 or math.inf,
        enable_prefix_cache=settings.enable_prefix_cache,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_context_length=max_context_length,
    )


def _as_served(settings: ModelSettings, manifest: Manifest) -> Manifest:
    """Return the manifest with the config for the served context length. Log which parts are not served."""
    if manifest.left_out:
        logger.warning("%s has parts that are not served: %s", manifest.name, manifest.left_out)
    return _for_context(settings, manifest)


def _for_context(settings: ModelSettings, manifest: Manifest) -> Manifest:
    length = context_length(settings, manifest.config)
    return dataclasses.replace(manifest, config=manifest.config.for_context(length))


def _resolve(settings: ModelSettings, manifest: Manifest) -> _ResolvedSettings:
    """Resolve the settings that may be "auto". Raises `SettingsError` if a setting does not fit model or device."""
    max_context_length, device = context_length(settings, manifest.config), find_device(settings.device)
    check_quantize(settings.quantize, manifest)
    library, missing_kernels = _load_kernels(settings, device)
    dtype, dtype_reason = _choose_dtype(settings, manifest, device, library)
    library = library if computes(manifest.config, dtype) else None
    threads, threads_reason = _choose_threads(settings, is_native=library is not None)
    context = KernelContext(
        config=manifest.config, device=torch.device(device), dtype=dtype, block_size=settings.block_size
    )
    cache_dtype = find_cache_dtype(settings.kv_cache_dtype, device, dtype)
    quantization = find_quantization(settings.quantize, device, dtype)
    try:
        attending = choose_attention(settings.attention, context, library)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    fallbacks = find_fallbacks(
        settings, manifest.config, dtype, attending, quantization, device=device, missing_kernels=missing_kernels
    )
    packs = device == "cpu" and (library is not None or _matrix_kind(settings.quantize, device, dtype) != "plain")
    packed = MATRICES if packs else ()
    if packs and manifest.config.tie_embeddings and (library is not None or settings.quantize != "none"):
        packed += (EMBEDDING,)  # its rows are then read from the LM head
    return _ResolvedSettings(
        context=context,
        kernels=library,
        attending=attending,
        cache_dtype=cache_dtype,
        quantization=quantization,
        packed_next=packed,
        threads=threads,
        max_context_length=max_context_length,
        reasons={"dtype": dtype_reason, "threads": threads_reason},
        fallbacks=fallbacks,
    )


def _plan(
    server: ServerNeeds | None, settings: ModelSettings, manifest: Manifest, resolved: _ResolvedSettings
) -> MemoryPlan:
    """Plan the memory that the first worker of a CPU server leaves to other processes; 0 bytes in all other cases."""
    if server is None or server.num_blocks or resolved.context.device.type != "cpu":
        return MemoryPlan(reserved_bytes=0, has_standby=server is not None and server.standby)
    return plan_memory(_loaded_model(manifest, resolved), settings, server)


def _loaded_model(manifest: Manifest, resolved: _ResolvedSettings) -> LoadedModel:
    dtype = resolved.context.dtype
    placements = manifest.placements.values()
    stored = {_STORED_DTYPES.get(part.dtype) for place in placements for part in place.parts if not place.encoded}
    return LoadedModel(
        config=manifest.config,
        value_bytes=dtype.itemsize,
        cache_value_bytes=resolved.cache_dtype.itemsize,
        num_copies=1 if resolved.kernels is None or (resolved.packed_next and stored == {dtype}) else 2,
        max_context_length=resolved.max_context_length,
        num_quantized=manifest.num_quantized,
        quantized_bytes=_quantized_bytes(manifest, resolved, is_loading=True),
        packs_embedding=EMBEDDING in resolved.packed_next,
    )


def _served_bytes(settings: ModelSettings, manifest: Manifest, resolved: _ResolvedSettings) -> int:
    """Return the bytes of the weights as they are served. While they are loaded, they take more on a CPU."""
    packed_bytes = _quantized_bytes(manifest, resolved, is_loading=False)
    loaded, saved = _loaded_model(manifest, resolved)._replace(num_copies=1, quantized_bytes=packed_bytes), 0.0
    if settings.quantize != "none" and not manifest.num_quantized:
        for name, shape in manifest.config.parameter_shapes().items():
            if name.endswith(resolved.packed_next):
                served = QUANTIZED_BYTES[matrix_kind(settings.quantize, name)]
                saved += math.prod(shape) * (loaded.value_bytes - served)
    return loaded.weight_bytes - round(saved)


def _quantized_bytes(manifest: Manifest, resolved: _ResolvedSettings, *, is_loading: bool) -> int:
    places = manifest.placements.values() if manifest.num_quantized else ()  # fp8 becomes floats
    return quantized_bytes(places, is_packed=resolved.kernels is not None, is_loading=is_loading)


def _largest_step(settings: ModelSettings, resolved: _ResolvedSettings) -> LargestStep:
    return LargestStep(
        block_size=settings.block_size,
        num_tokens=settings.max_batched_tokens,
        num_sampled=settings.max_num_running,
        max_context_length=resolved.max_context_length,
        cache_dtype=resolved.cache_dtype,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load_kernels(settings: ModelSettings, device: str) -> tuple[KernelLibrary | None, str]:
    """Load the native CPU kernels, compiled first if they are missing. Return them, or None and the reason.

    The reason is empty if the settings or the device ask for other kernels.
    """
    if device != "cpu" or settings.attention not in ("auto", "native"):
        return None, ""
    if settings.attention == "auto" and not levels_here():
        return None, "this CPU has no AVX2"
    try:
        return load_kernels(settings.cache_dir), ""
    except BuildError as error:
        return None, str(error)


def _choose_dtype(
    settings: ModelSettings, manifest: Manifest, device: str, library: KernelLibrary | None
) -> tuple[torch.dtype, str]:
    """Return the dtype to compute in, and the reason.

    On a CPU, "auto" is bfloat16 only with native kernels: PyTorch's CPU kernels are not batch-invariant in bfloat16.
    """
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype], "as set"
    if device != "cpu":
        return torch.bfloat16, "auto on CUDA"
    stored, reason = _STORED_DTYPES[manifest.weight_dtype], "auto: as the checkpoint"
    is_quantized = settings.quantize != "none" or manifest.quantization is not None
    # Quantization rounds far more than bfloat16, which therefore serves float16 beside it. A quantized GGUF file has
    # float32 norms, whatever the model's dtype was.
    if is_quantized and (stored is torch.float16 or (manifest.quantization and is_gguf(manifest.directory))):
        stored, reason = torch.bfloat16, "auto: the weights are quantized"
    if stored is not torch.bfloat16:
        return torch.float32, f"auto: the checkpoint is {_name(stored)}"
    if library is None or not computes(manifest.config, torch.bfloat16):
        return torch.float32, "auto: no native kernels compute this model here in bfloat16"
    return torch.bfloat16, reason


def _choose_threads(settings: ModelSettings, *, is_native: bool) -> tuple[int, str]:
    """Return the number of CPU threads of the model, and the reason.

    Native kernels use all CPUs: their threads share out the work of a step dynamically, so that a busy CPU delays no
    other thread. PyTorch's OpenMP threads wait for the slowest thread, so one CPU is left to the API process.
    """
    cpus = usable_cpus()
    if settings.threads != "auto":
        return settings.threads, f"as set; usable CPUs: {cpus}"
    if is_native:
        return cpus, "auto: all usable CPUs"
    return max(1, cpus - 1), f"auto: one less than the {cpus} usable CPUs"


def prepare_matrices(model: Transformer, quantize: str, quantization: Quantization | None) -> str:
    """Convert a model's weight matrices as --quantize says, or to the fastest float format. Return the format's name.

    Float matrices for native kernels are left to `to_native`, which packs them. Quantized matrices stay as they are.
    """
    weight = model.token_embedding.weight
    layers = [module for module in model.modules() if isinstance(module, GroupedLinear | Int8Linear)]
    stored = {"int8" if isinstance(layer, Int8Linear) else f"int{layer.stored.bits}" for layer in layers}
    kind = _matrix_kind(quantize, weight.device, weight.dtype)
    if quantize == "none" and library_for(model) is not None:
        kind = "packed"
    elif quantization is not None:
        replace_linears(model, quantization.make)
    elif kind in LINEAR_KINDS:
        replace_linears(model, kind)
    return min(stored, default=kind)


def _matrix_kind(quantize: str, device: torch.device | str, dtype: torch.dtype) -> str:
    if quantize != "none":
        return quantize
    return "packed" if can_pack(device, dtype) else "plain"


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for later steps instead of returning it to the operating system.

    Without page faults of newly mapped memory, a step of 64 sequences takes 27 ms instead of 54 ms.
    """
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def find_cache_dtype(wanted: str, device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a --kv-cache-dtype setting. Raises `SettingsError` if model or device do not support it."""
    if wanted != "float16":
        return dtype if wanted == "auto" else torch.int8
    if device != "cpu" or dtype is not torch.float32:
        model = f"{_name(dtype)} on {'the CPU' if device == 'cpu' else 'CUDA'}"
        raise SettingsError(
            f"--kv-cache-dtype {wanted} needs a float32 model on the CPU, and this model is {model}; omit the flag, or "
            "give --device cpu --dtype float32"
        )
    return torch.float16


def _stored_format(manifest: Manifest, matrices: str) -> dict[str, str]:
    """Return a note on the format of the matrices as the entry "matrices" of `EngineFacts.reasons`; {} without a note.

    The note is the checkpoint's quantization, after "dequantized from" if its int4 or int8 is served as floats. Of a
    checkpoint that is not quantized, only int4 has a note.
    """
    if (stored := manifest.quantization) is None:
        return {"matrices": INT4_TEXT} if matrices == "int4" else {}
    is_kept = matrices in ("int4", "int6", "int8") or not stored.is_kept
    return {
        "matrices": stored.text.removeprefix(matrices).lstrip(", ") if is_kept else f"dequantized from {stored.text}"
    }


def check_quantize(quantize: str, manifest: Manifest) -> None:
    """Raise `SettingsError` if --quantize is given for a quantized checkpoint. Only fp8, read as floats, is allowed."""
    stored = manifest.quantization
    if quantize != "none" and stored is not None and stored.is_kept:
        raise SettingsError(
            f"--quantize {quantize}: the checkpoint is quantized already ({stored.text}); omit the flag"
        )


def find_quantization(quantize: str, device: str, dtype: torch.dtype) -> Quantization | None:
    """Return the GPU quantization of a --quantize setting; None on a CPU and for none.

    Raises `SettingsError` if the device or `dtype` does not support the setting.
    """
    try:
        return choose_quantization(quantize, torch.device(device), dtype)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _num_blocks(
    settings: ModelSettings,
    resolved: _ResolvedSettings,
    reserved_bytes: int,
    profiled_bytes: int | None,
    num_workers: int = 1,
) -> int:
    """Return the number of KV-cache blocks: as requested, or for "auto" as many as are useful and fit into memory.

    Args:
        reserved_bytes: main memory to leave free for the server's other processes.
        profiled_bytes: measured GPU memory that the KV-cache may take; None on a CPU.
        num_workers: number of workers among which main memory is divided.
    Raises:
        ValueError, SettingsError: the KV-cache, as requested or for one context, does not fit into free memory; or the
            requested KV-cache does not hold one context.
    """
    if profiled_bytes is None:
        free = max(0, free_bytes(resolved.context.device.type) - reserved_bytes) // num_workers
        # One full context may take more than half of the memory, since otherwise the model could not be served.
        most, usual_share = int(free * CACHE_SHARE), free // 2
    else:
        free = most = usual_share = profiled_bytes
    block_size, block_bytes, max_context_length = settings.block_size, resolved.block_bytes, resolved.max_context_length
    blocks_per_context = -(-max_context_length // block_size)
    needed_mib = -(-blocks_per_context * block_bytes // _MIB)
    if settings.kv_cache_memory == "auto":
        if blocks_per_context * block_bytes > most:
            raise ValueError(
                f"a context of {max_context_length} tokens needs {needed_mib} MiB of KV-cache, but at most "
                f"{most // _MIB} MiB of memory can be used for it: {_length_advice(most // block_bytes * block_size)}"
            )
        usual = min(blocks_per_context, -(-_USUAL_LENGTH // block_size))
        useful = round(settings.max_num_running * usual * (1 + _PREFIX_CACHE_SHARE))
        return max(blocks_per_context, min(useful, usual_share // block_bytes))
    asked = settings.kv_cache_memory
    num_blocks = asked // block_bytes
    if free < asked:
        raise ValueError(
            f"--kv-cache-memory {asked.human_readable()}: only {free // _MIB} MiB are free; choose a smaller size"
        )
    if num_blocks < blocks_per_context:
        raise SettingsError(
            f"--kv-cache-memory {asked.human_readable()} holds {num_blocks * block_size} tokens, less "
            f"than the context of {max_context_length} tokens: set it to {needed_mib}MiB, or "
            f"{_length_advice(num_blocks * block_size)}"
        )
    return num_blocks


def _length_advice(fitting: int) -> str:
    return f"set --max-context-length {fitting}" if fitting else "use a smaller model or --block-size"


def free_bytes(device: str) -> int:
    """Return the free bytes of the current GPU, or for "cpu" the bytes of main memory that this process can take."""
    return available_memory_bytes() if device == "cpu" else torch.cuda.mem_get_info()[0]
