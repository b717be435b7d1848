"""Kernels of every level, called."""

import ctypes
import functools
import operator
from functools import partial
from pathlib import Path

import pytest
import torch

from model.kernels import loading as loading_module
from model.kernels.build import SHIPPED, find_built
from model.kernels.loading import Kernels, _parallel_of_this_process
from tests.model.kernel_libraries import BUILDABLE, CACHE, library_of


def test_the_threads_are_pytorchs() -> None:
    """It has loaded one runtime of OpenMP, which has the function."""
    assert _parallel_of_this_process()


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 131_072, 300_001])
def test_work_is_done_once_by_any_number_of_threads(level: str, threads: int, count: int) -> None:
    """Words read twice would fold away."""
    words = torch.arange(1, count + 1)
    read = library_of(level).function(
        "kvasir_read", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, result=ctypes.c_uint64
    )
    expected = functools.reduce(operator.xor, words.tolist(), 0)
    assert read(words.data_ptr(), count, threads) == expected


@pytest.mark.parametrize("level", BUILDABLE)
def test_an_unknown_kernel_is_an_error(level: str) -> None:
    with pytest.raises(AttributeError, match="kvasir_nothing"):
        library_of(level).function("kvasir_nothing")


@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_who_waits_for_kernels_is_told(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that compiled them, or at once."""
    library_of(level)
    path = find_built(BUILDABLE[level], (SHIPPED, CACHE))
    assert path is not None
    monkeypatch.setattr(loading_module, "find_built", lambda *_: None)
    monkeypatch.setattr(loading_module, "build", lambda *_: path)
    kernels, told = Kernels(), [0, 0]

    def tell(which: int) -> None:
        told[which] += 1

    kernels.when_loaded(partial(tell, 0))
    kernels.prepare(tmp_path, wait=True)
    assert kernels.loaded is not None
    assert kernels.loaded.level == level
    assert told == [1, 0]
    kernels.when_loaded(partial(tell, 1))
    kernels.prepare(tmp_path, wait=True)
    assert told == [1, 1]
