"""Import of Hugging Face directories with pickled weights: pickles become safetensors.

Pickles are read without running the code that a pickle may contain.
"""

import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from model.checkpoint.manifest import Manifest, read_manifest
from model.checkpoint.weights import save_shard
from model.huggingface.directory import INDEX_FILE, SINGLE_FILE, read_weight_map
from model.io.files import CheckpointError, OneLineError, parsing, reading, write_json, written_whole

_NO_CODE = "reading it would run code, which is not allowed; save only tensors and plain values"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
KEPT_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.bpe")


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """Read a dictionary that `torch.save` wrote in the zip format: plain values, and tensors mapped from the file.

    Raises:
        CheckpointError: the file cannot be read, would run code, or holds no dictionary with string keys.
    """
    try:
        with reading(path):
            values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_NO_CODE}") from error
    except CheckpointError:
        raise
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a complete file written by torch.save (torch 1.6 or later); copy the file again"
        ) from error
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{path}: expected a dictionary; save the model's state_dict")
    return values


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle of plain values. Raises CheckpointError if it refers to a class or function, or is damaged."""
    try:
        with parsing(path), reading(path), path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(f"{path}: not a complete pickle; copy the file again") from error


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that rejects every class and function. Numbers, strings, lists and dictionaries are accepted."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise OneLineError(_NO_CODE)


def convert_pickles(directory: Path, out: Path) -> Manifest:
    """Copy a Hugging Face directory to `out`, pickled weights as safetensors; return the manifest of `out`.

    Beside the weights, only files that match `KEPT_FILES` are copied, such as the config, tokenizer and template.
    Raises CheckpointError, also if `out` is not empty.
    """
    names = _pickle_names(directory)
    with written_whole(out) as new:
        for pattern in KEPT_FILES:
            for path in directory.glob(pattern):
                if path.name not in (_PICKLE_INDEX, INDEX_FILE):
                    shutil.copyfile(path, new / path.name)
        weight_map: dict[str, str] = {}
        for name in names:
            values = read_torch_file(directory / name)
            tensors = {key: tensor for key, tensor in values.items() if isinstance(tensor, Tensor)}
            new_name = SINGLE_FILE if len(names) == 1 else f"{name.removesuffix('.bin')}.safetensors"
            save_shard(_unshared(tensors), new / new_name)
            weight_map |= dict.fromkeys(tensors, new_name)
        if len(names) > 1:
            write_json(new / INDEX_FILE, {"weight_map": weight_map})
        read_manifest(new).verify()
    return read_manifest(out)


def _pickle_names(directory: Path) -> list[str]:
    index = directory / _PICKLE_INDEX
    if not index.is_file():
        if not (directory / _PICKLE).is_file():
            raise CheckpointError(
                f"{directory}: contains neither {_PICKLE} nor {_PICKLE_INDEX}; download the weights too"
            )
        return [_PICKLE]
    return sorted(set(read_weight_map(index, ".bin").values()))


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors, each in memory of its own, as safetensors requires: a tied head becomes a copy."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        shares = tensor.untyped_storage().data_ptr() in seen
        result[name] = tensor.clone() if shares else tensor.contiguous()
        seen.add(tensor.untyped_storage().data_ptr())
    return result
