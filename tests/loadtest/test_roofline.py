"""The probe finds a positive speed for every type, and takes the type that it is told."""

import pytest
import torch

from loadtest.measurement import processor_probe, roofline
from loadtest.measurement.roofline import Roofline


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_READ_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_SIDES", (64,))


@pytest.mark.parametrize("weight_type", ["float32", "bfloat16", "float64", "int8", "fp8"])
def test_a_probe(weight_type: str) -> None:
    machine = Roofline(weight_type, "cpu").probe()
    assert machine.bytes_per_second > 0
    assert machine.flops_per_second > 0


def test_the_peak_is_of_the_type_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    linear = torch.nn.functional.linear

    def spy(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        seen.append(weight_NK.dtype)
        return linear(x_MK, weight_NK)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    Roofline("bfloat16", "cpu").probe()
    assert set(seen) == {torch.bfloat16}


def test_processors_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_probe, "_SIDE", 64)
    threads = torch.get_num_threads()
    try:
        assert processor_probe.ProcessorProbe(1).gflops() > 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
