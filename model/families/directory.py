"""A Hugging Face directory's weight files: one safetensors file, or the shards that an index names. Never pickles."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint_files import CheckpointError, check_is_file, check_plain_name, read_json
from model.json_file import is_named

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """The files, in order, and which tensor the index says is in which; no index, no such claims."""

    names: tuple[str, ...]
    index: Mapping[str, str]


def what_is_wrong(path: Path) -> str:
    """Why a path that was given as a checkpoint is none, and what to do: one line.

    Expects one without config.json and without manifest.json.
    """
    if path.is_file():
        if pickle := _pickle_advice(path.parent, path):
            return pickle
        return f"{path}: a file; --checkpoint wants its directory, {path.parent}"
    if not path.is_dir():
        return f"{path}: no such directory; --checkpoint wants one on this machine, nothing is downloaded"
    if pickle := _pickle_advice(path):
        return pickle
    inside = sorted(child for name in ("config.json", "manifest.json") for child in path.glob(f"*/{name}"))
    if inside:
        return f"{path}: no checkpoint itself; take one that is in it, such as {inside[0].parent}"
    if list(path.glob("*.safetensors")):
        return f"{path / 'config.json'}: missing; it describes the model, download it too"
    return f"{path}: neither config.json nor manifest.json, so no checkpoint directory; name another"


def _pickle_advice(directory: Path, given: Path | None = None) -> str | None:
    """What to do with the first pickle of a directory, or with the one that was given; None where there is none."""
    pickles = sorted(path for pattern in _PICKLES for path in directory.glob(pattern))
    if given is not None:
        pickles = [path for path in pickles if path == given]
    if not pickles or list(directory.glob("*.safetensors")):
        return None
    flags = f"--nanogpt {pickles[0]} --tokenizer FILE" if pickles[0].name == "ckpt.pt" else f"--pickle {directory}"
    return (
        f"{pickles[0]}: a pickle can run code when it is read, so it is not; make safetensors of it with "
        f"`kvasir convert {flags} --out NEW_DIRECTORY`"
    )


def find_weight_files(directory: Path) -> WeightFiles:
    """The weight files of a directory. Whether they are there and whole, `model.families.placement` checks.

    Raises:
        CheckpointError: there are none, there are two sets, there are only pickles, or the index is unusable.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if is_named(index):
        indexed = _read_index(index)
        if is_named(single) and indexed.names != (SINGLE_FILE,):
            raise CheckpointError(f"{index}: {SINGLE_FILE} is there too; remove the one that is out of date")
        return indexed
    if is_named(single):
        check_is_file(single)
        return WeightFiles(names=(SINGLE_FILE,), index={})
    if pickle := _pickle_advice(directory):
        raise CheckpointError(pickle)
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
        if is_named(path.parent / name):
            check_is_file(path.parent / name)
        else:
            raise CheckpointError(f"{path.parent / name}: missing, and {INDEX_FILE} names it; download this shard too")
    return WeightFiles(names=names, index=weight_map)
