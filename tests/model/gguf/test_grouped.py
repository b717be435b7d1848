"""Grouped weights hold the numbers of a GGUF file's blocks, read and unpacked, or packed from the mapped file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from model.gguf import grouped
from model.gguf.block_types import dequantize
from model.gguf.grouped import map_grouped, read_grouped
from model.gguf.tensor_types import TENSOR_TYPES
from model.io.files import CheckpointError
from model.io.safetensors_header import TensorHeader
from model.native.weight_packing import pack
from model.nn.linear import make_grouped_linear
from model.system.memory_pages import HugePages
from tests.model.gguf.test_block_types import random_blocks
from tests.model.kernel_libraries import BUILDABLE, library_of

QUANTIZED = [name for name, kind in TENSOR_TYPES.items() if kind.is_quantized]
BEGIN = 5
CODES = {4: (-8, 7), 6: (-32, 31), 8: (-128, 127)}


def stored(path: Path, name: str, outputs: int, inputs: int) -> tuple[TensorHeader, torch.Tensor]:
    """Write a matrix of random blocks with moderate scales; return its header, and its numbers."""
    kind = TENSOR_TYPES[name]
    raw = random_blocks(name, outputs * inputs // kind.numbers)
    for place in (208,) if name == "Q6_K" else (0, 2):
        raw[:, place + 1] = raw[:, place + 1] & 0x83 | 0x20  # a float16 below 0.016, of any sign
    path.write_bytes(bytes(BEGIN) + raw.tobytes())
    header = TensorHeader(
        path=path, name="w", dtype=name, shape=(outputs, inputs), begin=BEGIN, end=path.stat().st_size
    )
    return header, torch.from_numpy(dequantize(kind, raw).reshape(outputs, inputs))


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_equal_the_dequantized_numbers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_SLICE", 1500)  # slices of two rows, and one of one row
    header, numbers = stored(tmp_path / "m.gguf", name, 7, 512)
    weight = read_grouped([header])
    assert weight.bits == (4 if name.startswith("Q4") else 6 if name in ("Q5_K", "Q6_K") else 8)
    least, most = CODES[weight.bits]
    assert least <= weight.codes_FI.min() <= weight.codes_FI.max() <= most
    if weight.bits == 6:
        assert torch.equal(weight.dense(), numbers)
    largest = numbers.view(7, -1, 32).abs().amax(dim=2).repeat_interleave(32, dim=1)
    assert bool(((weight.dense() - numbers).abs() <= 1e-6 * largest).all())
    assert (weight.offset_FG is None) == (name in ("Q8_0", "Q4_0", "Q5_0", "Q6_K"))


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_mapped_matrix_is_packed_as_the_unpacked_one(tmp_path: Path, name: str, level: str) -> None:
    header, _ = stored(tmp_path / "m.gguf", name, 70, 512)
    kernels, weights = library_of(level), (read_grouped([header]), map_grouped([header]))
    unpacked, mapped = (pack(make_grouped_linear(x, None), kernels, HugePages(), gated=True) for x in weights)
    assert unpacked.scale is not None
    assert mapped.scale is not None
    assert torch.equal(unpacked.weight, mapped.weight)
    assert torch.equal(unpacked.scale, mapped.scale)
    assert unpacked.numbers == mapped.numbers


@pytest.mark.parametrize("other", ["Q4_K", "Q5_K", "Q8_0"])
def test_parts_of_a_matrix_have_the_same_bits(tmp_path: Path, other: str) -> None:
    """K types are exact in 6 bits; beside another type, Q6_K is rounded to 8 bits in groups of 32."""
    headers, numbers = zip(
        *(stored(tmp_path / name, name, outputs, 512) for name, outputs in ((other, 7), ("Q6_K", 3))), strict=True
    )
    weight, expected = read_grouped(headers), torch.cat(numbers)
    assert weight.bits == (8 if other == "Q8_0" else 6)
    largest = expected.view(10, -1, 32).abs().amax(dim=2).repeat_interleave(32, dim=1)
    assert bool(((weight.dense() - expected).abs() <= (largest / 253 if other == "Q8_0" else 0.0)).all())
    if weight.bits == 6:
        layers = (make_grouped_linear(each, None) for each in (weight, map_grouped(headers)))
        kernels = library_of(next(iter(BUILDABLE)))
        unpacked, mapped = (pack(layer, kernels, HugePages(), gated=False) for layer in layers)
        assert torch.equal(unpacked.weight, mapped.weight)


@pytest.mark.parametrize("read", [read_grouped, map_grouped])
def test_a_truncated_matrix_is_rejected(tmp_path: Path, read: Callable[[Sequence[TensorHeader]], object]) -> None:
    header, _ = stored(tmp_path / "m.gguf", "Q4_0", 4, 64)
    header.path.write_bytes(header.path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has been truncated"):
        read([header])
    header.path.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read([header])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_scales_that_are_not_finite_are_rejected(tmp_path: Path, name: str) -> None:
    header, _ = stored(tmp_path / "m.gguf", name, 4, 256)
    data = bytearray(header.path.read_bytes())
    place = BEGIN + {"Q8_0": 0, "Q4_1": 2, "Q6_K": 208}[name]
    data[place : place + 2] = np.array(np.nan, np.float16).tobytes()
    header.path.write_bytes(data)
    with pytest.raises(CheckpointError, match="tensor w holds NaN or infinity"):
        read_grouped([header])
    for level in BUILDABLE:
        with pytest.raises(CheckpointError, match="tensor w holds NaN or infinity"):
            pack(make_grouped_linear(map_grouped([header]), None), library_of(level), HugePages())
