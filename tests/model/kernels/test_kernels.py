"""Kernels of every CPU level, called directly."""

import ctypes
import functools
import operator
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from model.kernels import kernel_library as loading_module
from model.kernels.build import SHIPPED, build, find_built, levels_here
from model.kernels.kernel_library import load_kernels
from tests.model.kernel_libraries import BUILDABLE, CACHE, library_of


def read_words(level: str, words: torch.Tensor, threads: int) -> int:
    """Return the exclusive or of all words."""
    read = library_of(level).function(
        "kvasir_read", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, result=ctypes.c_uint64
    )
    folded: int = read(words.data_ptr(), len(words), threads)
    return folded


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 131_072, 300_001])
def test_any_number_of_threads_computes_each_index_once(level: str, threads: int, count: int) -> None:
    """The kernel combines words by exclusive or: words that are read twice would cancel out."""
    words = torch.arange(1, count + 1)
    assert read_words(level, words, threads) == functools.reduce(operator.xor, words.tolist(), 0)


@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_concurrent_callers_of_a_kernel_get_correct_results(level: str) -> None:
    """One caller uses the thread pool, the other two callers compute alone."""
    words = [torch.arange(start, start + 400_000) for start in (1, 2, 3)]
    expected = [functools.reduce(operator.xor, each.tolist(), 0) for each in words]

    def read_all(which: int) -> set[int]:
        return {read_words(level, words[which], threads=3) for _ in range(50)}

    with ThreadPoolExecutor(max_workers=3) as pool:
        assert list(pool.map(read_all, range(3))) == [{folded} for folded in expected]


@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_a_forked_process_starts_new_kernel_threads(level: str) -> None:
    """Otherwise a child would wait forever for threads of its parent."""
    path = find_built(BUILDABLE[level], (SHIPPED, CACHE)) or build(BUILDABLE[level], CACHE)
    script = f"""
import ctypes, os
read = ctypes.CDLL({str(path)!r}).kvasir_read
words = (ctypes.c_int64 * 400_000)(*range(400_000))
here = read(words, 400_000, 3)
child = os.fork()
if child == 0:
    os._exit(0 if read(words, 400_000, 3) == here else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("level", BUILDABLE)
def test_an_unknown_kernel_name_raises_an_error(level: str) -> None:
    with pytest.raises(AttributeError, match="kvasir_nothing"):
        library_of(level).function("kvasir_nothing")


@pytest.mark.parametrize("level", [level.name for level in levels_here()[:1] if level.name in BUILDABLE])
def test_a_compiled_library_is_loaded(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_of(level)
    path = find_built(BUILDABLE[level], (SHIPPED, CACHE))
    assert path is not None
    monkeypatch.setattr(loading_module, "find_built", lambda *_: None)
    monkeypatch.setattr(loading_module, "build", lambda *_: path)
    assert load_kernels(tmp_path).level == level
