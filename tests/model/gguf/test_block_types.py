"""Dequantization of each block type, compared bit by bit with llama.cpp's gguf package."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as reference

from model.gguf.block_types import UNPACK, dequantize
from model.gguf.tensor_types import TENSOR_TYPES, TYPES_BY_ID


def random_blocks(kind_name: str, count: int) -> np.ndarray:
    """Return blocks of random bytes, whose float16 factors are finite."""
    kind = TENSOR_TYPES[kind_name]
    raw = np.random.default_rng(kind.bytes).integers(0, 256, (count, kind.bytes), dtype=np.uint8)
    raw[:, 1::2] &= 0xBF  # of the exponent of a float16 at an even place, the highest bit: no infinity, no NaN
    return raw


@pytest.mark.parametrize("name", TENSOR_TYPES)
def test_numbers_equal_those_of_the_gguf_package(name: str) -> None:
    raw = random_blocks(name, 300)
    ours = dequantize(TENSOR_TYPES[name], raw)
    theirs = reference(raw, gguf.GGMLQuantizationType[name])
    assert ours.dtype == np.float32
    assert ours.shape == (300, TENSOR_TYPES[name].numbers)
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32).reshape(ours.shape))


def test_sizes_equal_those_of_the_gguf_package() -> None:
    sizes = {type_id: (kind.name, kind.numbers, kind.bytes) for type_id, kind in TYPES_BY_ID.items()}
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert sizes.items() <= theirs.items()


@pytest.mark.parametrize("name", UNPACK)
def test_codes_fit_the_bits_of_the_type(name: str) -> None:
    unpack = UNPACK[name]
    assert unpack is not None
    unpacked = unpack(random_blocks(name, 300))
    spread = int(unpacked.codes_BW.max()) - int(unpacked.codes_BW.min())
    assert spread == 2 ** int(name[1]) - 1
