"""LoRA adapters for models that PyTorch computes: linear layers that add a token's adapter to their result.

Legend: T packed tokens, E inputs, F outputs, R rank, X tokens with one adapter.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.checkpoint.lora_adapter import Adapter
from model.nn.transformer import Transformer

Matrices = dict[str, tuple[Tensor, Tensor]]  # module -> down RE, up FR


class AdaptedLinear(nn.Module):
    """Linear layer of any kind, plus the additions of the adapters of a step's tokens.

    groups: tokens and matrices of each adapter in the step; all layers of a model share this list.
    """

    def __init__(self, base: nn.Module, name: str, groups: list[tuple[Tensor, Matrices]]) -> None:
        super().__init__()
        self.base, self.name, self.groups = base, name, groups

    def forward(self, x_TE: Tensor) -> Tensor:
        """Apply the layer, and add the result of each token's adapter: (tokens, inputs) to (tokens, outputs)."""
        out_TF: Tensor = self.base(x_TE)
        for tokens_X, matrices in self.groups:
            if self.name in matrices:
                down_RE, up_FR = matrices[self.name]
                low_XR = x_TE[tokens_X].to(down_RE.dtype) @ down_RE.t()
                out_TF = out_TF.index_add(0, tokens_X, (low_XR @ up_FR.t()).to(out_TF.dtype))
        return out_TF


class LinearAdapters:
    """Adapters of a `Transformer` by key. The first one replaces the layers' linear modules by `AdaptedLinear`."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._device = model, model.token_embedding.weight.device
        self._adapters: dict[str, Matrices] = {}
        self._groups: list[tuple[Tensor, Matrices]] = []
        self._is_prepared = False

    def __contains__(self, key: str) -> bool:
        return key in self._adapters

    def pack(self, adapter: Adapter) -> Callable[[], None]:
        """Move an adapter to the device; any thread may. Return a function that adds it, for the engine thread."""
        matrices = {
            name: (torch.from_numpy(low.down_RI).to(self._device), torch.from_numpy(low.up_FR).to(self._device))
            for name, low in adapter.matrices.items()
        }
        return partial(self._add, adapter.key, matrices)

    def _add(self, key: str, matrices: Matrices) -> None:
        if not self._is_prepared:
            for number in range(len(self._model.layers)):
                for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.up", "mlp.down"):
                    self._replace(f"layers.{number}.{name}")
            self._is_prepared = True
        self._adapters[key] = matrices

    def remove(self, key: str) -> None:
        self._adapters.pop(key, None)

    @contextlib.contextmanager
    def applied(self, tokens: Mapping[str, Tensor]) -> Iterator[None]:
        """Context manager in which the layers apply adapters to tokens: indices on the device, by the adapter's key."""
        self._groups.extend((tokens_X, self._adapters[key]) for key, tokens_X in tokens.items())
        try:
            yield
        finally:
            self._groups.clear()

    def _replace(self, name: str) -> None:
        parent, _, child = name.rpartition(".")
        module = self._model.get_submodule(parent)
        if (base := getattr(module, child, None)) is not None:
            setattr(module, child, AdaptedLinear(base, name, self._groups))


def adapter_tokens(runs: Sequence[tuple[str, int]]) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the tokens of each adapter in a step. runs: as `ModelInputs.adapters`."""
    ends = np.cumsum([length for _, length in runs])
    tokens: dict[str, list[NDArray[np.int64]]] = {}
    for (key, length), end in zip(runs, ends, strict=True):
        if key:
            tokens.setdefault(key, []).append(np.arange(end - length, end))
    return {key: np.concatenate(parts) for key, parts in tokens.items()}
