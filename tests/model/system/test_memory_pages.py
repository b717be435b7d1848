"""Tensors moved to pages of 2 MiB keep their values."""

import gc
from pathlib import Path

import pytest
import torch

from model.system.memory_pages import PAGE, HugePages, zeros


def resident_bytes() -> int:
    """Return the anonymous resident memory of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 1_000, 3 * PAGE, 40 * PAGE])
def test_tensors_are_contiguous_aligned_zeros(dtype: torch.dtype, size: int) -> None:
    kept = HugePages().empty((size, 1), dtype)
    assert (kept.shape, kept.dtype) == ((size, 1), dtype)
    assert not kept.any()
    assert kept.is_contiguous()
    assert kept.data_ptr() % 64 == 0


def filled(pages: HugePages, size: int, number: int) -> torch.Tensor:
    return pages.empty((size,), torch.float32).fill_(number)


def test_tensors_are_adjacent_and_outlive_huge_pages() -> None:
    pages = HugePages()
    kept = [filled(pages, 300_001, number) for number in range(40)]
    del pages
    gc.collect()
    assert [set(each.tolist()) for each in kept] == [{float(number)} for number in range(40)]


def test_huge_pages_keep_the_values_of_tensors() -> None:
    """The tensor keeps its values and address. Memory use grows at most by rounding up to pages of 2 MiB."""
    pages = HugePages()
    kept = [filled(pages, 700_001, number) for number in range(5)]
    places = [tensor.data_ptr() for tensor in kept]
    before = resident_bytes()
    pages.enlarge()
    grown = resident_bytes() - before
    assert [set(each.tolist()) for each in kept] == [{float(number)} for number in range(5)]
    assert [tensor.data_ptr() for tensor in kept] == places
    assert grown < 2 * PAGE + 2**20
    HugePages().enlarge()  # no kept tensor is no error


def test_a_tensor_larger_than_the_memory_raises_out_of_memory() -> None:
    """The exception has the type of torch's own allocation errors."""
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot allocate [\d,]+ bytes of CPU memory"):
        HugePages().empty((2**60,), torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot allocate [\d,]+ bytes of CPU memory"):
        zeros((2**60,), torch.float32)


@pytest.mark.parametrize("shape", [(0, 5), (3, 7), (PAGE // 4, 1), (PAGE, 3)])
def test_zeros_have_the_requested_shape(shape: tuple[int, ...]) -> None:
    tensor = zeros(shape, torch.float32)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor += 1  # it may be written
    assert tensor.all()
