"""Kernel library of this machine, compiled if it is missing, and ctypes mirrors of its C structures. Torch-free.

The fields of a structure have the order of the C structure with the same name in model/kernels/src.
"""

import ctypes
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.kernels.build import SHIPPED, BuildError, CpuLevel, build, find_built, levels_here

logger = logging.getLogger(__name__)

_MARK = "kvasir_inputs_side_by_side"  # a function of every kernel library
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class KernelLibrary:
    """Loaded kernel library of one CPU level. Raises OSError if the file is not a kernel library."""

    def __init__(self, path: Path, level: CpuLevel) -> None:
        self.level = level.name
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, _MARK):
            raise OSError(f"{path} is not a kernel library: it has no function {_MARK}")

    def function(self, name: str, *argument_types: Any, result: Any = None) -> Any:
        """Return a kernel function by its C name. The types in the first call for a name apply to all later calls."""
        found = getattr(self._library, name)
        if found.argtypes is None:
            found.argtypes, found.restype = argument_types, result
        return found


def load_kernels(cache: Path) -> KernelLibrary:
    """Load the kernel library of this machine's best CPU level, from `SHIPPED` or from the directory `cache`.

    If both lack the library, it is compiled into `cache` first, which takes 10 to 40 s.

    Raises:
        BuildError: no level supports this CPU, or the library cannot be compiled or loaded. The message is one line.
    """
    level, cache = next(iter(levels_here()), None), Path(os.path.expanduser(cache))
    if level is None:
        raise BuildError("the native kernels do not support this CPU: they need AVX2, FMA and F16C")
    if (path := find_built(level, (SHIPPED, cache))) is not None:
        with suppress(OSError):  # a damaged file, which is compiled again
            return KernelLibrary(path, level)
    logger.info(
        "compiling native kernels for CPU level %s into %s: up to a minute, once per machine", level.name, cache
    )
    path = build(level, cache)
    try:
        return KernelLibrary(path, level)
    except OSError as error:
        raise BuildError(f"cannot load the kernel library {path}: {error}; install another C++ compiler") from error


class AttentionBatch(ctypes.Structure):
    """Arguments of the attention kernel that all layers of a step share."""

    _fields_ = (
        *((name, _INT) for name in ("num_sequences", "num_tokens", "block_size", "num_blocks", "table_width")),
        *((name, _POINTER) for name in ("query_starts", "context_lengths", "tables", "slots")),
    )


class AttentionCall(ctypes.Structure):
    """Arguments of the attention kernel for one layer."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "out", "keys", "values")),
        *((name, _INT) for name in ("q_stride", "k_stride", "v_stride", "num_heads", "num_kv_heads", "head_size")),
        *((name, _INT) for name in ("window", "bias_length", "bias_stride", "threads")),
        *((name, _POINTER) for name in ("bias", "key_scales", "value_scales")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


class Matrix(ctypes.Structure):
    """Weight matrix of a linear layer, packed in the order in which the kernels read it."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias", "scale", "shift")),
        *((name, _INT) for name in ("inputs", "outputs", "numbers")),
    )


class LayerWeights(ctypes.Structure):
    """Weights of one transformer layer, as the kernels read them."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "up", "down", "input_gate", "input_out")),
        *((name, _POINTER) for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((name, _POINTER) for name in ("attention_out_norm", "attention_out_norm_bias")),
        *((name, _POINTER) for name in ("mlp_out_norm", "mlp_out_norm_bias", "query_norm", "key_norm")),
        *((name, _POINTER) for name in ("value_norm", "input_norm")),
        *((name, _INT) for name in ("kv_heads", "head_dim", "mlp", "rotated", "query_angle", "key_angle")),
        *((name, _POINTER) for name in ("router", "expert_ups", "expert_downs")),
        ("factor", ctypes.c_float),
    )


class LayerInputWeights(ctypes.Structure):
    """Weights of `model.nn.layers.LayerInputs`, which give each layer an input beside x, as the kernels read them."""

    _fields_ = (
        ("projection", Matrix),
        *((name, _POINTER) for name in ("table", "norm")),
        ("size", _INT),
        *((name, ctypes.c_float) for name in ("x_factor", "table_factor")),
    )


class LowRank(ctypes.Structure):
    """Addition of a LoRA adapter to one matrix, as the kernels read it; all fields are 0 without an addition."""

    _fields_ = (("down", _POINTER), ("up", _POINTER), ("rank", _INT))


class LayerAdapter(ctypes.Structure):
    """Additions of a LoRA adapter to the matrices of one layer."""

    _fields_ = tuple((name, LowRank) for name in ("qkv", "out", "up", "down"))


class Shape(ctypes.Structure):
    """Layer sizes, and kinds of norm and activation, that all layers of a model share, as the kernels read them."""

    _fields_ = (
        *((name, _INT) for name in ("hidden", "heads", "num_angles", "norm_scope", "norms_rotated")),
        *((name, _INT) for name in ("numbers", "norm", "activation")),
        *((name, _INT) for name in ("gated", "is_parallel", "num_experts", "experts_per_row", "normalizes_experts")),
        *((name, ctypes.c_float) for name in ("eps", "logit_soft_cap")),
    )


class Rows(ctypes.Structure):
    """Addresses of one engine step's buffers, which hold a row for each token. Python owns their memory."""

    _fields_ = (
        *((name, _INT) for name in ("count", "threads")),
        *((name, _POINTER) for name in ("x", "added", "qkv", "wide", "narrow", "scales", "layer_inputs")),
        *((name, _POINTER) for name in ("cosines", "sines", "positions", "embedding", "tokens", "packed")),
        *((name, _POINTER) for name in ("adapters", "pieces")),
        ("num_pieces", _INT),
        ("low", _POINTER),
        ("low_stride", _INT),
        ("additions", _POINTER),
    )


class StepArguments(ctypes.Structure):
    """Arguments of the kernels that compute layers, logits, or a whole decode step."""

    _fields_ = (
        *((name, _POINTER) for name in ("shape", "rows", "layers", "layer_inputs")),
        *((name, _INT) for name in ("num_layers", "num_positions", "vocabulary")),
        *((name, _POINTER) for name in ("attend", "batch", "calls", "mixed", "head", "norm", "norm_bias")),
        *((name, _POINTER) for name in ("logits", "ids")),
        ("num_ids", _INT),
    )
