"""Safe reading of pickles: only tensors and plain values are accepted, and no code is run."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from model.io.checkpoint_files import CheckpointError

_NO_CODE = "it would run code when read, which is not allowed; save only tensors and plain values"


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """Read a dictionary that `torch.save` wrote. Tensors are memory-mapped, so they are read from disk on use.

    Raises:
        CheckpointError: the file cannot be read, or is not a dictionary of tensors and plain values in torch's zip
            format.
    """
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_NO_CODE}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give a file this user can read") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a complete file of torch.save (version 1.6 or later); copy it again"
        ) from error
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{path}: expected a dictionary; save the model's state_dict")
    return values


def read_plain_pickle(path: Path) -> Any:
    """Read a pickle that names no class and no function.

    Raises:
        CheckpointError: the file cannot be read, or the pickle names a class or a function.
    """
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give a file this user can read") from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise CheckpointError(f"{path}: not a complete pickle; copy it again") from error


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that rejects every class and function. Numbers, strings, lists and dictionaries need no class."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise CheckpointError(_NO_CODE)
