"""Kernels of every level, called."""

import ctypes
import functools
import operator

import pytest
import torch

from model.kernels.library import _parallel_of_this_process
from tests.model.kernel_libraries import BUILDABLE, library_of


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
