"""Estimate of the memory of all CUDA graphs from two captured graphs, with a fake GPU on a CPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.paged import PagedAttention, gathered, one_by_one
from model.nn.transformer import Transformer
from service.engine.execution import gpu_setup
from service.engine.execution.cuda_graphs import buckets
from service.engine.execution.gpu_setup import DeviceMemory, LargestStep, cache_bytes, graph_bytes
from service.engine.execution.model_runner import ModelRunner
from tests.engine.fakes import call_again
from tests.model.configs import VARIANTS, attention_layers, build

LARGEST = LargestStep(block_size=4, num_tokens=200, num_sampled=9, max_context_length=64)


class FakeDevice:
    """Fake GPU on which the first CUDA graph takes `first` bytes, and each later graph `later` bytes.

    Half of each later graph's bytes are taken at its first replay.
    """

    def __init__(self, *, first: int, later: int) -> None:
        self.free = 10_000_000
        self._next, self._later = first, later

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        at_capture, at_replay = self._next - self._later // 2, [self._later // 2]
        self.free -= at_capture
        self._next = self._later
        replay = call_again(compute)

        def uploaded() -> Tensor:
            self.free -= at_replay.pop() if at_replay else 0
            return replay()

        return uploaded


def model() -> Transformer:
    made = build(VARIANTS["rotary-gqa"])
    for attention in attention_layers(made):
        attention.backend = PagedAttention(gathered, one_by_one)
    return made


@pytest.mark.parametrize(("first", "later"), [(1000, 10), (70, 70), (500, 0)])
def test_the_estimate_from_two_graphs_equals_the_memory_of_all_graphs(first: int, later: int) -> None:
    device = FakeDevice(first=first, later=later)
    estimate = graph_bytes(model(), LARGEST, device.capture, lambda: device.free)
    assert 10_000_000 - device.free == first + later
    assert estimate == first + (len(buckets(9, 16)) - 1) * later
    whole = FakeDevice(first=first, later=later)
    runner = ModelRunner(model(), num_blocks=40, block_size=4, vocab_size=257)

    def replayed(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = whole.capture(compute)
        replay()
        return replay

    runner.capture_decodes(replayed, max_rows=9, max_context_length=64)
    assert 10_000_000 - whole.free == estimate


@pytest.mark.parametrize("captures", [True, False])
def test_the_kv_cache_leaves_memory_for_cuda_graphs(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    """The model is a fake object that claims to be on a GPU. Without CUDA graphs, the KV-cache gets 800 bytes."""
    tried: Any = SimpleNamespace(token_embedding=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    memory = DeviceMemory(total=1000, free=900, reserved=100, peak=100)
    monkeypatch.setattr(gpu_setup, "measure", lambda *given: memory)
    monkeypatch.setattr(gpu_setup, "graph_bytes", lambda *given: 70)
    assert cache_bytes(tried, LARGEST, 0.9, call_again if captures else None) == (730 if captures else 800)
