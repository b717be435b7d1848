"""Metrics say how attention is computed, now and after our own kernels have been compiled."""

from collections.abc import Callable

import pytest

from model.kernels.loading import Kernels
from service.metrics import Metrics
from service.worker import observe_attention
from tests.ops.observations import scrape


def path() -> list[str]:
    """What is 1 of the gauge's series."""
    series = {name: value for name, value in scrape().items() if name.startswith("attention_path")}
    assert len(series) == 4
    return [name.split('"')[1] for name, value in series.items() if value == 1]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "paged (decode: in place, prompts: one by one)"])
def test_other_paths_stay(metrics: Metrics, attention: str) -> None:
    observe_attention(metrics, attention, Kernels())
    assert path() == [attention.split()[0]]


def test_native_serves_when_its_kernels_are_loaded(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Callable[[], None]] = []
    kernels = Kernels()
    monkeypatch.setattr(kernels, "when_loaded", waiting.append)
    observe_attention(metrics, "native", kernels)
    assert path() == ["sdpa"]
    (told,) = waiting
    told()
    assert path() == ["native"]
