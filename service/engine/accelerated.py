"""What an engine takes of a GPU: attention over the paged cache, memory for it, recorded steps, matrices in eight bits
where they were asked for.

Each is tried when the engine is built, and what does not hold on this card is left out with a warning: the engine then
computes the same, slower.
"""

import logging
from dataclasses import dataclass, replace

import torch

from model.attention.interface import ATTENTION_BACKENDS, AttentionBackend
from model.attention.ways import Chosen, Place, choose, fits
from model.eight_bits import EightBits
from model.eight_bits import choose as choose_eight_bits
from model.fused import fuse
from model.kernels.levels import has_vector_level
from model.transformer import Transformer
from service.engine.config import EngineConfig
from service.engine.graphs import Capture, CudaCapture
from service.engine.memory import LargestStep, free_device_bytes, measure
from service.engine.prompt_graphs import CudaPieces, Pieces, record_prompts
from service.engine.recording_memory import recorded_bytes
from service.engine.runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attending:
    """A backend for a model, its name in words, and whether decode steps that take it can be recorded."""

    backend: AttentionBackend
    name: str
    recordable: bool


def attention_for(wanted: str, place: Place) -> Attending:
    """Return the backend of an --attention setting.

    auto is native on a CPU with vector instructions that the native kernels know (their scalar level is slower than
    oneDNN), paged on a GPU where the model's layers fit it, else sdpa.

    Raises:
        ValueError: paged was asked for, and the model's layers do not fit it; native, and the device is no CPU.
        RuntimeError: no way of attention holds on this device.
    """
    fitting = fits(place.config)
    if wanted == "auto":
        if place.device.type == "cpu":
            wanted = "native" if has_vector_level() else "sdpa"
        else:
            wanted = "paged" if fitting else "sdpa"
    if wanted == "native" and place.device.type != "cpu":
        raise ValueError("--attention native: only on the CPU; leave it out, or give --device cpu")
    if wanted != "paged":
        return Attending(backend=ATTENTION_BACKENDS[wanted], name=wanted, recordable=False)
    if not fitting:
        raise ValueError("--attention paged: not for a model with biases in its scores; give --attention sdpa")
    chosen: Chosen = choose(place)
    for reason in chosen.left_out:
        level = logging.WARNING if place.device.type == "cuda" else logging.INFO
        logger.log(level, "attention: left out %s", reason)
    return Attending(backend=chosen.backend, name=str(chosen), recordable=True)


def eight_bits_for(quantize: str, device: torch.device, dtype: torch.dtype) -> EightBits | None:
    """How a --quantize setting makes matrices on a GPU, tried there; None on a CPU, and where nothing was asked for.

    Raises:
        ValueError: the device has no such products.
    """
    if quantize == "none":
        return None
    if device.type == "cpu":
        if quantize == "fp8":
            raise ValueError("--quantize fp8: only on a GPU; give --quantize int8, or leave it out")
        return None
    chosen = choose_eight_bits(quantize, device, dtype)
    if chosen.left_out is not None:
        logger.warning("left out kernels for matrices in eight bits: %s", chosen.left_out)
    logger.info("%s", chosen)
    return chosen


def fuse_for_gpu(model: Transformer) -> None:
    """On a GPU, fewer kernels between matrix products, each kind if it holds there."""
    if model.token_embedding.weight.device.type == "cuda":
        for reason in fuse(model):
            logger.warning("left out %s", reason)


def capture_for(device: torch.device) -> Capture | None:
    """What records decode steps on this device; None where they are computed one by one."""
    return CudaCapture() if device.type == "cuda" else None


def pieces_for(device: torch.device) -> Pieces | None:
    """What records steps with prompts on this device, in pieces; None where they are computed kernel by kernel."""
    return CudaPieces() if device.type == "cuda" else None


def cache_bytes(model: Transformer, largest: LargestStep, share: float, *, records: bool) -> int | None:
    """What the KV-cache may take of a GPU's memory, of which we use at most this share; None on a CPU, where half of
    what is free is the rule.

    Args:
        records: steps will be recorded.

    Raises:
        torch.OutOfMemoryError: the device does not hold the largest step.
    """
    device = model.token_embedding.weight.device
    if device.type != "cuda":
        return None
    memory = measure(model, largest)
    capture, pieces = capture_for(device), pieces_for(device)
    if records and capture is not None and pieces is not None:
        try:
            taken = recorded_bytes(model, largest, capture=capture, pieces=pieces, free_bytes=free_device_bytes)
        except Exception as error:  # the driver, the allocator or a kernel of somebody else's may raise anything
            logger.warning("what recorded steps take of the memory is not known: %s", error)
        else:
            memory = replace(memory, recordings=taken)
    logger.info("the largest step tried: %s", memory)
    return memory.for_cache(share)


def recorded_runner(
    model: Transformer, config: EngineConfig, vocab_size: int, capture: Capture, pieces: Pieces | None = None
) -> ModelRunner:
    """A runner whose decode steps are recorded, and the others in pieces; the plain one, with a warning, where that
    fails.

    Args:
        pieces: what records the others; None: what the device has.
    """
    runner = ModelRunner(model, num_blocks=config.num_blocks, block_size=config.block_size, vocab_size=vocab_size)
    most = model.config.max_context_length
    length = most if config.max_context_length is None else min(most, config.max_context_length)
    try:
        shapes = runner.record(capture, max_rows=config.max_num_running, max_context_length=length)
    except Exception as error:  # the driver, the allocator or a kernel of somebody else's may raise anything
        logger.warning("decode steps are not recorded: %s", error)
    else:
        logger.info("decode steps of up to %d sequences are recorded, in %d shapes", shapes[0].rows, len(shapes))
    pieces = pieces or pieces_for(model.token_embedding.weight.device)
    if pieces is not None:
        _record_prompts(model, pieces, config.max_batched_tokens)
    return runner


def _record_prompts(model: Transformer, pieces: Pieces, max_rows: int) -> None:
    try:
        rows = record_prompts(model, pieces, max_rows)
    except Exception as error:  # see above
        logger.warning("steps with prompts are not recorded: %s", error)
    else:
        logger.info("steps with prompts of up to %d tokens are recorded, in %d sizes", rows[0], len(rows))
