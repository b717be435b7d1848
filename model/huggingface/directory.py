"""Weight files of a Hugging Face directory: one safetensors file, or several and an index. Pickles are rejected."""

import os
from collections.abc import Mapping
from pathlib import Path

from model.io.files import CheckpointError, check_is_file, check_plain_name, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def describe_problem(path: Path) -> str:
    """Return an error message with the remedy for a path that is no checkpoint: missing, a file, or without config."""
    if pickle := _pickle_advice(path):
        return pickle
    if path.is_file():
        directory = f"its directory, {path.parent}" if list(path.parent.glob("*.safetensors")) else "a directory"
        return f"{path}: is a file, but not a GGUF file; give {directory}"
    if path.exists() and not path.is_dir():
        return f"{path}: neither a directory nor a regular file; give a directory or a GGUF file"
    if not path.is_dir():
        return f"{path}: no such directory or file; give a local path, because nothing is downloaded"
    inside = sorted(child for name in ("config.json", "manifest.json") for child in path.glob(f"*/{name}"))
    if inside:
        return f"{path}: not a checkpoint, but contains checkpoints; give one of them, such as {inside[0].parent}"
    if found := sorted(path.glob("*.gguf")):
        return f"{path}: a directory with GGUF files; give one of them, such as {found[0]}"
    if list(path.glob("*.safetensors")):
        return f"{path / 'config.json'}: missing; it describes the model, download it too"
    return f"{path}: no checkpoint: neither config.json nor manifest.json is in it; give another directory"


def _pickle_advice(path: Path) -> str | None:
    """Return an error message with the remedy for a pickle, or a directory with pickles and no safetensors file.

    None for any other path.
    """
    directory = path if path.is_dir() else path.parent
    pickles = sorted(found for pattern in _PICKLES for found in directory.glob(pattern) if path in (directory, found))
    if not pickles or list(directory.glob("*.safetensors")):
        return None
    flags = f"--nanogpt {pickles[0]} --tokenizer FILE" if pickles[0].name == "ckpt.pt" else f"--pickle {directory}"
    return (
        f"{pickles[0]}: pickles are not read, because reading one can run code; convert it to safetensors with "
        f"`kvasir convert {flags} --out NEW_DIRECTORY`"
    )


def find_weight_files(directory: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the names of a Hugging Face directory's weight files, and the file name of each tensor.

    The second value is from the index file; it is empty without an index file.

    Raises:
        CheckpointError: the directory has no weights or only pickles, lacks a file of the index, or has a
            model.safetensors that the index does not list; or the index is malformed.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if os.path.lexists(index):
        weight_map = read_weight_map(index, ".safetensors")
        names = tuple(sorted(set(weight_map.values())))
        for name in names:
            if not os.path.lexists(directory / name):
                raise CheckpointError(
                    f"{directory / name}: missing, but listed in {INDEX_FILE}; download this shard too"
                )
            check_is_file(directory / name)
        if os.path.lexists(single) and names != (SINGLE_FILE,):
            raise CheckpointError(f"{index}: {SINGLE_FILE} exists too; remove the outdated one of both files")
        return names, weight_map
    if os.path.lexists(single):
        check_is_file(single)
        return (SINGLE_FILE,), {}
    if pickle := _pickle_advice(directory):
        raise CheckpointError(pickle)
    raise CheckpointError(f"{directory}: contains neither {SINGLE_FILE} nor {INDEX_FILE}; download the weights too")


def read_weight_map(path: Path, suffix: str) -> dict[str, str]:
    """Return each tensor's file name from an index file. Raises CheckpointError for a file name without `suffix`."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map (tensor name -> file name); download this file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(suffix):
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is in {name!r}, which is not a {suffix} file; save the model again"
            )
        if not tensor.isprintable():
            raise CheckpointError(
                f"{path}: the tensor name {tensor!r} has unprintable characters; save the model again"
            )
        check_plain_name(path, name)
    return weight_map
