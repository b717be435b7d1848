"""PyTorch's attention of sequences of any length (torch.nn.attention.varlen), whichever arguments its version has.

The function's arguments change between versions of PyTorch, so that they are looked up in its signature: `arguments`
is a pure function of their names.

Legend: C chunks, X packed tokens of chunks, S packed positions of contexts, H query heads, K key/value heads, D head
dimension.
"""

import importlib
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from model.attention.form import AttentionForm
from model.attention.ragged import RaggedView
from model.kv_cache import KVCache

MODULE = "torch.nn.attention.varlen"


class VarlenError(ValueError):
    """This version of PyTorch's function cannot attend so; says why."""


def varlen_attn(module: str = MODULE) -> Callable[..., Any]:
    """PyTorch's function, by name: its module imports torch._dynamo, as much as all else that a worker imports, which
    only a GPU has a use for.

    Raises:
        VarlenError: this PyTorch has none; it came with 2.10.
    """
    try:
        function: Callable[..., Any] = importlib.import_module(module).varlen_attn
    except ImportError:
        raise VarlenError(f"PyTorch {torch.__version__} has no varlen_attn") from None
    return function


def arguments(names: Collection[str], *, scale: float, window: int | None, grouped: bool) -> dict[str, Any]:
    """What to give a function of these arguments for causal attention, beside tensors and lengths.

    The kernel counts a window by the positions before a token, we with the token. One split of the keys each, where
    that can be asked for: the order of additions then does not depend on who shares the batch.

    Raises:
        VarlenError: it cannot be told of the scale, the window, or that attention is causal.
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
    """A `model.attention.paged.ChunkWay`: keys of the chunks' contexts are copied end to end, all attended in one call.

    Args:
        function: `varlen_attn`, of any version.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names = frozenset(inspect.signature(function).parameters)

    def __call__(self, q_XHD: Tensor, form: AttentionForm, view: RaggedView, kv_cache: KVCache) -> Tensor:
        """XHD."""
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
