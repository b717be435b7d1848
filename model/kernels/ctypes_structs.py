"""ctypes mirrors of the C structures that kernels take: pointers and 64-bit integers. Torch-free."""

import ctypes

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """Mirror of `Matrix` in linear.h. Fields must have the same order."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias", "scale", "shift")),
        *((name, _INT) for name in ("inputs", "outputs", "numbers")),
    )


class LayerWeights(ctypes.Structure):
    """Mirror of `LayerWeights` in layers.cpp. Fields must have the same order."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((name, _POINTER) for name in ("query_norm", "key_norm")),
    )


class Shape(ctypes.Structure):
    """Mirror of `Shape` in layers.cpp. Fields must have the same order."""

    _fields_ = (
        *((name, _INT) for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp", "rotated", "norm_scope")),
        *((name, _INT) for name in ("numbers", "norm", "activation", "gated", "norms_outputs", "is_parallel")),
        ("eps", ctypes.c_float),
    )


class Rows(ctypes.Structure):
    """Mirror of `Rows` in layers.cpp. Fields must have the same order."""

    _fields_ = (
        *((name, _INT) for name in ("count", "threads")),
        *((name, _POINTER) for name in ("x", "added", "qkv", "wide", "narrow", "scales")),
        *((name, _POINTER) for name in ("cosines", "sines", "positions", "embedding", "tokens")),
    )


class Decode(ctypes.Structure):
    """Mirror of `Decode` in layers.cpp. Fields must have the same order."""

    _fields_ = (
        *((name, _POINTER) for name in ("shape", "rows", "layers")),
        *((name, _INT) for name in ("num_layers", "num_positions", "vocabulary")),
        *((name, _POINTER) for name in ("attend", "batch", "calls", "mixed", "head", "norm", "norm_bias")),
        *((name, _POINTER) for name in ("logits", "ids")),
        ("num_ids", _INT),
    )
