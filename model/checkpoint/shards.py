"""Writing of weight files by Hugging Face's convention: model.safetensors, or shards of at most 5 GB with an index."""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from model.huggingface.directory import INDEX_FILE, SINGLE_FILE

MAX_SHARD_BYTES = 5 * 10**9


def write_shards(
    directory: Path,
    num_bytes: Mapping[str, int],
    tensors: Iterable[Tensor],
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors to one file, or to several with an index if they exceed MAX_SHARD_BYTES.

    Args:
        num_bytes: the size of each tensor, by name, in the order of `tensors`.
        tensors: contiguous tensors on the CPU. Only those of one shard are in memory at a time.
    """
    shards = plan_shards(num_bytes)
    weight_map: dict[str, str] = {}
    pending = iter(tensors)
    for number, names in enumerate(shards, start=1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # An argument, not a variable, so that this shard is freed before the next shard is read.
        save_shard(
            dict(zip(names, itertools.islice(pending, len(names)), strict=True)),
            directory / file_name,
            metadata=metadata,
        )
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def plan_shards(num_bytes: Mapping[str, int]) -> list[list[str]]:
    """Return the names of each shard's tensors, in order. A tensor over MAX_SHARD_BYTES gets its own shard."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in num_bytes.items():
        if shards[-1] and used + size > MAX_SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def remove_shards(directory: Path) -> None:
    """Delete the weight files and the index of a checkpoint directory."""
    for pattern in (SINGLE_FILE, "model-*-of-*.safetensors", INDEX_FILE):
        for path in directory.glob(pattern):
            path.unlink()


def save_shard(tensors: dict[str, Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file with mode 0644: the library's 0600 keeps other users from serving it."""
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)
