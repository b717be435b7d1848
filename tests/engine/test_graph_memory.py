"""Memory estimate of CUDA graphs, extrapolated from two graphs of each kind, with a fake device on a CPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.kernel_selection import gathered, one_by_one
from model.attention.paged import PagedAttention
from model.nn.transformer import Transformer
from service.engine.execution import gpu_setup
from service.engine.execution.cuda_graphs import buckets, call_again
from service.engine.execution.gpu_memory import DeviceMemory, LargestStep
from service.engine.execution.gpu_setup import cache_bytes, create_graphed_runner
from service.engine.execution.graph_memory import graph_bytes
from service.engine.execution.prefill_graphs import Between, prompt_rows, uncut
from service.engine.scheduling.config import EngineConfig
from tests.model.configs import VARIANTS, build

LARGEST = LargestStep(block_size=4, num_tokens=200, num_sampled=9, max_context_length=64)


class Device:
    """A device on which the first graph of a kind takes `first` bytes, and each later one `later` bytes."""

    def __init__(self, *, first: int, later: int) -> None:
        self.free = 10_000_000
        self._first, self._later = first, later
        self._kinds: set[str] = set()

    def _take(self, kind: str) -> None:
        self.free -= self._later if kind in self._kinds else self._first
        self._kinds.add(kind)

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A fake `Capture`."""
        self._take("decode")
        return call_again(compute)

    def pieces(self, compute: Callable[[Between], Tensor]) -> Callable[[Between], Tensor]:
        """A fake `Pieces`."""
        self._take("prompt")
        return uncut(compute)


def model() -> Transformer:
    made = build(VARIANTS["rotary-gqa"])
    for layer in made.layers:
        layer.attention.backend = PagedAttention(gathered, one_by_one)
    return made


@pytest.mark.parametrize(("first", "later"), [(1000, 10), (70, 70), (500, 0)])
def test_two_of_a_kind_tell_what_all_take(first: int, later: int) -> None:
    device = Device(first=first, later=later)
    told = graph_bytes(model(), LARGEST, capture=device.capture, pieces=device.pieces, free_bytes=lambda: device.free)
    num_tried = 10_000_000 - device.free
    num_others = len(buckets(9, 16)) + len(prompt_rows(200)) - 2
    assert told == 2 * first + num_others * later
    assert num_tried == 2 * first + 2 * later
    whole = Device(first=first, later=later)
    config = EngineConfig(block_size=4, num_blocks=40, max_num_running=9, max_batched_tokens=200, max_context_length=64)
    create_graphed_runner(model(), config, 257, whole.capture, whole.pieces)
    assert 10_000_000 - whole.free == told


def test_a_model_is_left_as_it_was() -> None:
    device, tried = Device(first=1, later=1), model()
    backends = [layer.attention.backend for layer in tried.layers]
    graph_bytes(tried, LARGEST, capture=device.capture, pieces=device.pieces, free_bytes=lambda: device.free)
    assert type(tried) is Transformer
    assert [layer.attention.backend for layer in tried.layers] == backends


@pytest.mark.parametrize("records", [True, False])
def test_the_cache_leaves_room_for_them(monkeypatch: pytest.MonkeyPatch, records: bool) -> None:
    """Uses a model that claims to be on a GPU."""
    tried: Any = SimpleNamespace(token_embedding=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    memory = DeviceMemory(total=1000, free=900, reserved=100, peak=100)
    monkeypatch.setattr(gpu_setup, "measure", lambda *given: memory)
    for name in ("capture_for", "pieces_for"):
        monkeypatch.setattr(gpu_setup, name, lambda device: call_again)
    monkeypatch.setattr(gpu_setup, "graph_bytes", lambda *given, **more: 70)
    assert cache_bytes(tried, LARGEST, 0.9, records=records) == (730 if records else 800)


def test_a_device_that_records_nothing_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any, **more: Any) -> int:
        raise RuntimeError("operation not permitted when stream is capturing")

    tried: Any = SimpleNamespace(token_embedding=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    monkeypatch.setattr(gpu_setup, "measure", lambda *given: DeviceMemory(total=9, free=9, reserved=0, peak=2))
    for name in ("capture_for", "pieces_for"):
        monkeypatch.setattr(gpu_setup, name, lambda device: call_again)
    monkeypatch.setattr(gpu_setup, "graph_bytes", fail)
    assert cache_bytes(tried, LARGEST, 1.0, records=True) == 7
    assert "memory of CUDA graphs is unknown and not reserved: operation not permitted" in caplog.text
