"""A Hugging Face directory's weight files: one safetensors file, or the shards that an index names. Never pickles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint_files import CheckpointError, check_plain_name, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """The files, in order, and which tensor the index says is in which; no index, no such claims."""

    names: tuple[str, ...]
    index: Mapping[str, str]


def find_weight_files(directory: Path) -> WeightFiles:
    """The weight files of a directory. Whether they are there and whole, `model.families.placement` checks.

    Raises:
        CheckpointError: there are none, there are two sets, there are only pickles, or the index is unusable.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if index.is_file():
        indexed = _read_index(index)
        if single.is_file() and indexed.names != (SINGLE_FILE,):
            raise CheckpointError(f"{index}: {SINGLE_FILE} is there too; remove the one that is out of date")
        return indexed
    if single.is_file():
        return WeightFiles(names=(SINGLE_FILE,), index={})
    if pickles := sorted(path for pattern in _PICKLES for path in directory.glob(pattern)):
        of_nanogpt = pickles[0].name == "ckpt.pt"
        flags = f"--nanogpt {pickles[0]} --tokenizer FILE" if of_nanogpt else f"--pickle {directory}"
        raise CheckpointError(
            f"{pickles[0]}: a pickle can run code when it is read, so it is not; make safetensors of it with "
            f"`kvasir convert {flags} --out NEW_DIRECTORY`"
        )
    raise CheckpointError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; download the weights too")


def _read_index(path: Path) -> WeightFiles:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map of tensors and their files; download the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: tensor {tensor!r} is in {name!r}, no safetensors file; save it again")
        if not tensor.isprintable():
            raise CheckpointError(f"{path}: the tensor name {tensor!r} cannot be shown; save it again")
        check_plain_name(path, name)
    names = tuple(sorted(set(weight_map.values())))
    for name in names:
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent / name}: missing, and {INDEX_FILE} names it; download this shard too")
    return WeightFiles(names=names, index=weight_map)
