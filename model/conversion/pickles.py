"""Pickles, read so that nothing in them is executed: tensors and plain values, or an error."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from model.checkpoint_files import CheckpointError

_NO_CODE = "it asks for code to be run, which is never done; save tensors and plain values alone"


def read_torch_file(path: Path) -> Mapping[str, Any]:
    """What `torch.save` wrote, a dictionary. Tensors stay in the file, mapped, until they are used.

    Raises:
        CheckpointError: the file is no dictionary of tensors and plain values in torch's zip format.
    """
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_NO_CODE}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give a file this user can read") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a whole file of torch.save (version 1.6 or later); copy it again"
        ) from error
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise CheckpointError(f"{path}: a dictionary expected; save the model's state_dict")
    return values


def read_plain_pickle(path: Path) -> Any:
    """The value of a pickle that names no class and no function at all.

    Raises:
        CheckpointError: it cannot be read, or asks for more.
    """
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give a file this user can read") from error
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path}: not a whole pickle; copy it again") from error


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class: numbers, strings, lists and dictionaries need none."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise CheckpointError(_NO_CODE)
