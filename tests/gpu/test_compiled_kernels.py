"""Every Triton kernel compiles for four generations of GPUs, fits their limits, and spills no registers."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from model.system.triton_modules import import_with_triton

pytestmark = pytest.mark.triton

compiled_kernels: Any = import_with_triton("tests.gpu.compiled_kernels")


@pytest.fixture(scope="module")
def launches() -> Any:
    return compiled_kernels.launches()


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_fit_a_gpu_and_spill_no_registers(
    capability: int, launches: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The variant of each kernel with the largest tiles. `tests.gpu.page` compiles all, for a table in docs/gpu.md."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # GPUs before compute capability 8.9 have no fp8, and `model.gpu.quantization.choose` refuses it.
    found = compiled_kernels.largest(launches)
    wanted = [launch for launch in found if capability >= 89 or "fp8" not in launch.case]
    problems = {launch.key: compiled_kernels.compile_for(launch, capability).problems(capability) for launch in wanted}
    assert {key: found for key, found in problems.items() if found} == {}
    assert len(problems) > 25


def test_every_triton_kernel_is_launched(launches: Any) -> None:
    modules = ["model.attention.triton_decode"]
    modules += [f"model.gpu.{name}" for name in ("fused_kernels", "quantized_kernels", "sampling_kernels")]
    defined = {
        value.fn.__name__
        for name in modules
        for value in vars(importlib.import_module(name)).values()
        if type(value).__name__ == "JITFunction"
    }
    # Called by other kernels:
    helpers = {"_split_size", "_scaled", "_turn", "_scale", "_normed", "_write", "begin", "store_quantized"}
    assert {launch.kernel.fn.__name__ for launch in launches} == defined - helpers


def test_a_kernel_with_too_many_numbers_for_its_registers_is_found(launches: Any) -> None:
    (launch,) = (each for each in launches if each.case == "Gemma 2B float32" and "attend_splits" in each.name)
    small = dataclasses.replace(launch, arguments=launch.arguments | {"num_warps": 4})
    (problem,) = compiled_kernels.compile_for(small, 90).problems(90)
    assert problem.endswith("bytes of spilled registers")
