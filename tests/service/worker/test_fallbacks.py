"""Slower paths of an engine: named with the reason, and refused by --require-fast-path."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.gpu.quantization import Quantization
from service.config.settings import ModelSettings, SettingsError
from service.engine.execution.gpu_setup import AttentionChoice
from service.worker import fallbacks
from service.worker.fallbacks import find_fallbacks
from tests.model.configs import VARIANTS

FAST = AttentionChoice(backend=ATTENTION_BACKENDS["eager"], name="paged", can_capture=True)
TRITON = "triton is not installed"


def found(
    used_device: str,
    attending: AttentionChoice = FAST,
    *,
    variant: str = "rotary-gqa",
    dtype: torch.dtype = torch.bfloat16,
    quantization: Quantization | None = None,
    missing_kernels: str = "",
    **values: Any,
) -> tuple[str, ...]:
    given = ModelSettings(checkpoint=Path("none"), **values)
    return find_fallbacks(
        *(given, VARIANTS[variant], dtype, attending, quantization), device=used_device, missing_kernels=missing_kernels
    )


@pytest.fixture(params=[True, False], ids=["triton", "no triton"])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(fallbacks, "import_with_triton", lambda name: object() if request.param else None)
    return bool(request.param)


def test_a_gpu_without_triton_has_fallbacks(has_triton: bool) -> None:
    quantization = Quantization("int8", object() if has_triton else None)
    attending = FAST if has_triton else dataclasses.replace(FAST, left_out=(f"triton: {TRITON}",))
    expected = (f"attention kernel triton: {TRITON}", f"fused kernels: {TRITON}", f"int8 kernel for few rows: {TRITON}")
    assert found("cuda", attending, quantization=quantization) == (() if has_triton else expected)


def test_layers_that_no_graph_captures_are_a_fallback_unless_the_user_chose_it(has_triton: bool) -> None:
    attending = dataclasses.replace(FAST, can_capture=False)
    text = "CUDA graphs: they cannot capture this model's layers"
    assert (text in found("cuda:1", attending)) is True
    assert text not in found("cuda", attending, cuda_graphs=False)
    assert text not in found("cuda", attending, attention="sdpa")


def test_a_cpu_without_native_kernels_has_a_fallback() -> None:
    assert found("cpu") == ()
    assert found("cpu", missing_kernels="no C++ compiler") == ("native kernels: no C++ compiler",)
    assert found("cpu", missing_kernels="no C++ compiler", attention="sdpa") == ()
    assert found("cpu", dtype=torch.float64) == ("native kernels: they do not compute this model in float64",)


def test_a_gpu_that_pytorch_does_not_find_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "has_nvidia_driver", lambda: True)
    assert found("cpu") == ("CUDA: PyTorch finds no CUDA device, but this machine has NVIDIA's driver",)
    assert found("cpu", device="cpu") == ()


def test_the_setting_refuses_a_fallback_and_names_it() -> None:
    assert found("cpu", require_fast_path=True) == ()
    with pytest.raises(SettingsError, match="--require-fast-path: not available: native kernels: no C\\+\\+ compiler"):
        found("cpu", missing_kernels="no C++ compiler", require_fast_path=True)
