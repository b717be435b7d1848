"""int8 and fp8 matrices on a CUDA device: accuracy, batch invariance, CUDA graphs, and the whole engine."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from model.checkpoint.manifest import read_manifest
from model.gpu.quantization import FORMATS, Quantization, choose
from model.nn.linear import quantize_rows
from service.config.settings import ModelSettings
from service.engine.execution.cuda_graphs import CudaCapture
from service.worker.engine_factory import build_engine

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("name", FORMATS)]

CUDA = torch.device("cuda")
# Outputs, inputs: cut along the inputs and whole, with and without padding.
SHAPES = [(48, 64), (53, 37), (1536, 8960), (2048, 1536), (17_920, 1536), (151_936, 1536)]


def chosen(name: str) -> Quantization:
    if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.fail("this GPU has no fp8")
    return choose(name, CUDA, torch.bfloat16)


def dequantized(x_TE: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize the rows of a matrix, and return the dequantized matrix, float64."""
    numbers_TE, scale_T = quantize_rows(x_TE, dtype)
    return numbers_TE.double() * scale_T[:, None].double()


def matrix(shape: tuple[int, int], rows: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Return a random weight (outputs, inputs), bias (outputs), and inputs (tokens, inputs)."""
    generator = torch.Generator("cuda").manual_seed(shape[1])
    sizes = (shape, shape[:1], (rows, shape[1]))
    weight_FE, bias_F, x_TE = (torch.randn(size, generator=generator, device=CUDA).bfloat16() for size in sizes)
    return weight_FE, bias_F, x_TE


@pytest.mark.parametrize("shape", [(48, 64), (40, 2090)])
@pytest.mark.parametrize("is_plain", [True, False])
def test_both_kinds_of_kernel_match_the_product_of_the_dequantized_matrices(
    name: str, shape: tuple[int, int], is_plain: bool
) -> None:
    weight_FE, bias_F, x_TE = matrix(shape, rows=100)
    dtype = FORMATS[name]
    linear = (Quantization(name) if is_plain else chosen(name)).make(weight_FE, bias_F)
    expected_TF = dequantized(x_TE, dtype) @ dequantized(weight_FE, dtype).t() + bias_F.double()
    for rows in (1, 5, 20, 64, 100):
        error = (linear(x_TE[:rows]).double() - expected_TF[:rows]).abs().max() / expected_TF.abs().max()
        assert error.item() <= 2e-2


def test_triton_kernels_are_used_on_a_gpu(name: str) -> None:
    assert chosen(name).kernels is not None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_triton_kernels_equal_pytorch(name: str, shape: tuple[int, int], has_bias: bool) -> None:
    weight_FE, bias_F, x_TE = matrix(shape)
    ours, plain = (
        quantization.make(weight_FE, bias_F if has_bias else None)
        for quantization in (chosen(name), Quantization(name))
    )
    for rows in (1, 4, 16, 17, 64, 65, 200):
        expected = plain(x_TE[:rows]).float()
        assert (ours(x_TE[:rows]).float() - expected).abs().max() <= 1e-2 * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
def test_other_rows_change_no_bit_of_int8_and_little_of_fp8(name: str, shape: tuple[int, int]) -> None:
    weight_FE, bias_F, x_TE = matrix(shape)
    linear = chosen(name).make(weight_FE, bias_F)
    whole = linear(x_TE)
    for rows in (1, 4, 16, 17, 64, 65):
        few = linear(x_TE[:rows])
        if name == "int8":
            assert torch.equal(few, whole[:rows])
        else:
            assert (few - whole[:rows]).abs().max() <= 1e-2 * whole.abs().max()


def test_a_cuda_graph_replay_reads_its_current_inputs(name: str) -> None:
    weight_FE, bias_F, x_TE = matrix((1536, 8960), rows=16)
    linear = chosen(name).make(weight_FE, bias_F)
    still_TE = torch.zeros_like(x_TE)
    with torch.inference_mode():
        replay = CudaCapture()(lambda: linear(still_TE))
        for shift in range(3):
            still_TE.copy_(x_TE.roll(shift, 0))
            assert torch.equal(replay(), linear(x_TE.roll(shift, 0)))


def test_an_engine_serves_with_quantized_matrices(name: Literal["int8", "fp8"], tiny_checkpoint: Path) -> None:
    chosen(name)
    settings = ModelSettings(checkpoint=tiny_checkpoint, max_num_running=4, quantize=name)
    engine, facts = build_engine(settings, read_manifest(tiny_checkpoint))
    assert (facts.device, facts.matrices) == ("cuda", name)
    engine.warm_up()
    assert not engine.has_work
