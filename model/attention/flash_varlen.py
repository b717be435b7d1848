"""Prompt chunks by PyTorch's variable-length attention (torch.nn.attention.varlen), for several PyTorch versions.

The parameters of `varlen_attn` differ between versions of PyTorch. `arguments` chooses keyword arguments from the
parameter names in the function's signature.

Legend: C chunks, X packed tokens of chunks, S packed positions of contexts, H query heads, K key/value heads, D head
dimension.
"""

import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.packed_layout import RaggedView

MODULE = "torch.nn.attention.varlen"


class VarlenError(ValueError):
    """PyTorch's `varlen_attn` is missing or does not support the request; the message gives the reason."""


def varlen_attn(module: str = MODULE) -> Callable[..., Any]:
    """Import and return PyTorch's `varlen_attn`.

    The import is deferred because the module imports torch._dynamo, which costs as much as all other imports of a
    worker together. Only workers with a GPU need the function.

    Raises:
        VarlenError: this PyTorch has no `varlen_attn`, which was added in 2.10.
    """
    try:
        function: Callable[..., Any] = importlib.import_module(module).varlen_attn
    except ImportError:
        raise VarlenError(f"PyTorch {torch.__version__} has no varlen_attn") from None
    return function


def arguments(names: Collection[str], *, scale: float, window: int | None, grouped: bool) -> dict[str, Any]:
    """Return the keyword arguments for causal attention, other than tensors and lengths.

    `window_size` of the kernel counts the positions before a token; `window` counts the token too. `num_splits` is 1
    where the parameter exists: the order of additions is then batch-invariant.

    Args:
        names: parameter names of the function.
        grouped: whether there are fewer key/value heads than query heads.

    Raises:
        VarlenError: the function has no parameter for the scale, the window, or causal attention.
    """
    if "scale" not in names:
        raise VarlenError("varlen_attn takes no scale")
    given: dict[str, Any] = {"scale": scale}
    if "window_size" in names:
        given["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is not None or "is_causal" not in names:
        raise VarlenError("varlen_attn takes no window")
    else:
        given["is_causal"] = True
    if grouped and "enable_gqa" in names:
        given["enable_gqa"] = True
    if "num_splits" in names:
        given["num_splits"] = 1
    return given


class VarlenChunks:
    """A `model.attention.paged.ChunkKernel` that computes all chunks in one call of `varlen_attn`.

    Keys and values of the chunks' contexts are first copied from the cache into one packed tensor.

    Args:
        function: `varlen_attn` of any PyTorch version.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names = frozenset(inspect.signature(function).parameters)

    def __call__(self, q_XHD: Tensor, form: AttentionForm, view: RaggedView, kv_cache: KVCache) -> Tensor:
        """Return the attention output of all chunks, XHD."""
        k_SKD, v_SKD = kv_cache.gather_slots(form.layer, view.slots_S)
        grouped = q_XHD.shape[1] != k_SKD.shape[1]
        out_XHD: Tensor = self._function(
            q_XHD,
            k_SKD,
            v_SKD,
            view.query_starts,
            view.context_starts,
            max(view.query_lengths),
            max(view.context_lengths),
            **arguments(self._names, scale=form.scale, window=form.window, grouped=grouped),
        )
        return out_XHD
