"""Weight files of a Hugging Face directory: one safetensors file, or the shards of an index. Pickles are rejected."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from model.io.checkpoint_files import CheckpointError, check_is_file, check_plain_name, read_json
from model.io.json_file import is_named

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Names of the weight files, sorted, and the index: tensor name -> file name; empty without an index file."""

    names: tuple[str, ...]
    index: Mapping[str, str]


def what_is_wrong(path: Path) -> str:
    """Return one line that says why a path is not a checkpoint directory, with the remedy.

    Args:
        path: a path without a config.json and without a manifest.json.
    """
    if path.is_file():
        if pickle := _pickle_advice(path.parent, path):
            return pickle
        return f"{path}: is a file; give --checkpoint its directory, {path.parent}"
    if not path.is_dir():
        return f"{path}: no such directory; give --checkpoint a local directory, nothing is downloaded"
    if pickle := _pickle_advice(path):
        return pickle
    inside = sorted(child for name in ("config.json", "manifest.json") for child in path.glob(f"*/{name}"))
    if inside:
        return f"{path}: not a checkpoint, but contains checkpoints; give one of them, such as {inside[0].parent}"
    if list(path.glob("*.safetensors")):
        return f"{path / 'config.json'}: missing; it describes the model, download it too"
    return f"{path}: no checkpoint: neither config.json nor manifest.json is in it; give another directory"


def _pickle_advice(directory: Path, given: Path | None = None) -> str | None:
    """Return the advice to convert a pickle: the given file, or the first pickle of a directory.

    None if there is no such pickle, or if the directory has safetensors files.
    """
    pickles = sorted(path for pattern in _PICKLES for path in directory.glob(pattern))
    if given is not None:
        pickles = [path for path in pickles if path == given]
    if not pickles or list(directory.glob("*.safetensors")):
        return None
    flags = f"--nanogpt {pickles[0]} --tokenizer FILE" if pickles[0].name == "ckpt.pt" else f"--pickle {directory}"
    return (
        f"{pickles[0]}: pickles are not read, because reading one can run code; convert it to safetensors with "
        f"`kvasir convert {flags} --out NEW_DIRECTORY`"
    )


def find_weight_files(directory: Path) -> WeightFiles:
    """Find the weight files of a directory. `model.huggingface.tensor_placement` checks their content.

    Raises:
        CheckpointError: the directory has no weights, two sets of weights or only pickles; the index is unusable; or
            a file that the index names is missing.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if is_named(index):
        indexed = _read_index(index)
        if is_named(single) and indexed.names != (SINGLE_FILE,):
            raise CheckpointError(f"{index}: {SINGLE_FILE} exists too; remove the outdated one")
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
        raise CheckpointError(f"{path}: no weight_map from tensors to files; download the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is in {name!r}, which is not a safetensors file; save it again"
            )
        if not tensor.isprintable():
            raise CheckpointError(f"{path}: the tensor name {tensor!r} has unprintable characters; save it again")
        check_plain_name(path, name)
    names = tuple(sorted(set(weight_map.values())))
    for name in names:
        if is_named(path.parent / name):
            check_is_file(path.parent / name)
        else:
            raise CheckpointError(f"{path.parent / name}: missing, and {INDEX_FILE} names it; download this shard too")
    return WeightFiles(names=names, index=weight_map)
