"""LoRA adapters for the native kernels: matrices in the layout of low_rank.h, and the adapter of each row of a step.

Legend: F outputs, I inputs of a matrix, R rank, N blocks of 16 outputs,
G groups of inputs, S inputs of a group, side by side, P pieces of a step's rows.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model.checkpoint.lora_adapter import Adapter, Addition
from model.config import ModelConfig
from model.kernels.kernel_library import LayerAdapter, LowRank
from model.native.weight_packing import BLOCK, interleaved, pad_outputs, padded
from model.system.memory_pages import HugePages

_PIECE_ROWS = 8  # rows that one task computes, and that share the loads of an adapter's weights
_FIELDS = {"attention.qkv": "qkv", "attention.out": "out", "mlp.gate_up": "up", "mlp.up": "up", "mlp.down": "down"}


class PackedAdapter:
    """LoRA adapter in the kernels' memory layout.

    layers: additions to each layer. rank: largest rank of an addition, rounded up to a multiple of 16.
    """

    def __init__(self, adapter: Adapter, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.layers = (LayerAdapter * config.num_layers)()
        self._pages, self._entries = HugePages(), list[Tensor]()  # keep the memory behind the pointers alive
        for name, low in adapter.matrices.items():
            _, number, module = name.split(".", 2)
            setattr(self.layers[int(number)], _FIELDS[module], self._pack(low, gated=module == "mlp.gate_up"))
        self._pages.enlarge()
        self.rank = max(len(low.down_RI) for low in adapter.matrices.values())
        self.rank += -self.rank % BLOCK

    def _keep(self, weights: Tensor) -> Tensor:
        return self._pages.empty(weights.shape, self._dtype).copy_(weights)

    def _pack(self, addition: Addition, *, gated: bool) -> LowRank:
        side_by_side = 2 if self._dtype is torch.bfloat16 else 1  # inputs

        def blocks(rows: Tensor) -> Tensor:  # (blocks, groups of inputs, outputs, inputs of a group)
            rows = functional.pad(rows, (0, -rows.shape[1] % side_by_side))
            return rows.view(-1, BLOCK, rows.shape[1] // side_by_side, side_by_side).transpose(1, 2)

        down_RI, up_FR = torch.from_numpy(addition.down_RI), torch.from_numpy(addition.up_FR)
        down_RI = functional.pad(down_RI, (0, 0, 0, -len(down_RI) % BLOCK))
        down = self._keep(blocks(down_RI))
        up_NGFS = blocks(interleaved(up_FR) if gated else pad_outputs(up_FR))
        # Inputs with weights of a block: q, k and v, or gate and up, have inputs of their own.
        used_NG = (up_NGFS != 0).flatten(2).any(dim=2).int()
        first_N, size = used_NG.argmax(dim=1), used_NG.shape[1]
        counts_N = (size - used_NG.flip(1).argmax(dim=1) - first_N) * used_NG.any(dim=1)
        groups_G = torch.arange(size)
        is_kept_NG = (groups_G >= first_N[:, None]) & (groups_G < (first_N + counts_N)[:, None])
        up = self._keep(up_NGFS[is_kept_NG])
        weights_N = up.data_ptr() + (counts_N.cumsum(0) - counts_N) * BLOCK * side_by_side * up.itemsize
        entries = torch.stack([weights_N, first_N, counts_N], dim=1).contiguous()
        self._entries.append(entries)
        return LowRank(down.data_ptr(), entries.data_ptr(), len(down_RI))


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """Adapters of a step's rows, and buffers of the kernels.

    pointers: for each row the address of its adapter's `PackedAdapter.layers`; null: no adapter.
    starts_P: first row of each piece, then the number of rows. All rows of a piece have the same adapter, or none.
    low_TR, additions_TF: buffers for the products of the rows with `down`, and then with `up`.
    held: the adapters that `pointers` point to, kept alive.
    """

    pointers: Any
    starts_P: Tensor
    low_TR: Tensor
    additions_TF: Tensor
    held: tuple[PackedAdapter, ...]


class NativeAdapters:
    """Adapters of a model by key, packed for the native kernels with weights of `dtype`: float32 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.largest_head_dim
        outputs = heads, config.hidden_size, (2 if config.mlp.gated else 1) * config.largest_mlp_size
        self._max_outputs = max(map(padded, outputs))
        self._adapters: dict[str, PackedAdapter] = {}
        self._last: tuple[object, AdapterRows | None] = (), None

    def __contains__(self, key: str) -> bool:
        return key in self._adapters

    def pack(self, adapter: Adapter) -> Callable[[], None]:
        """Pack an adapter; any thread may. Return a function that adds it, for the engine thread to call."""
        packed = PackedAdapter(adapter, self._config, self._dtype)
        return partial(self._adapters.__setitem__, adapter.key, packed)

    def remove(self, key: str) -> None:
        self._adapters.pop(key, None)
        self._last = (), None  # its rows may hold the adapter

    def rows(self, runs: tuple[tuple[str, int], ...], count: int) -> AdapterRows | None:
        """Return the adapters of a step's `count` rows; None if `runs` is empty. Raises KeyError for an unknown key.

        A call with the same `runs` object and `count` as the last call returns the same object again.
        runs: pairs of an adapter's key and a number of consecutive rows, in the order of rows. Rows with the key "",
            and rows after the last run, have no adapter. If not empty, `runs` names at least one adapter.
        """
        if not runs:
            return None
        known, rows = self._last
        if known is not runs or rows is None or len(rows.pointers) != count:
            pointers = (ctypes.c_void_p * count)()
            row, starts = 0, []
            keys = [key for key, length in runs for _ in range(length)]
            for key, group in groupby(keys + [""] * (count - len(keys))):
                length = len(list(group))
                pieces = -(-length // _PIECE_ROWS)
                starts += [row + length * piece // pieces for piece in range(pieces)]
                if key:
                    pointers[row : row + length] = [ctypes.addressof(self._adapters[key].layers)] * length
                row += length
            used = tuple(self._adapters[key] for key in dict.fromkeys(key for key, _ in runs) if key)
            low_TR = torch.empty(count, max(adapter.rank for adapter in used))
            starts_P = torch.tensor([*starts, count])
            rows = AdapterRows(pointers, starts_P, low_TR, torch.empty(count, self._max_outputs), used)
            self._last = runs, rows
        return rows
