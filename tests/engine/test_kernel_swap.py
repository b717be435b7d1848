"""What is left for later when our own kernels take a model's place: memory goes back, and large pages come."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from model.transformer import Transformer
from service.engine import kernel_swap
from service.engine.kernel_swap import KernelSwap


class FakeKernels:
    """Loaded, or not yet."""

    def __init__(self, calls: list[str], loaded: object) -> None:
        self.calls, self.loaded = calls, loaded

    def serve(self) -> None:
        self.calls.append("serve")


@pytest.mark.parametrize(
    ("is_serving", "before", "after"),
    [(False, ["pack", "free", "give back"], ["enlarge"]), (True, ["pack", "free"], ["give back", "enlarge"])],
)
def test_who_waits_for_kernels_does_not_wait_for_pages(
    is_serving: bool, before: list[str], after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others serve meanwhile, even the freed memory is given back later."""
    calls: list[str] = []
    threads: list[Callable[[], None]] = []
    packed = SimpleNamespace(free_matrices=lambda: calls.append("free"), enlarge_pages=lambda: calls.append("enlarge"))

    def pack(*arguments: Any, **named: Any) -> SimpleNamespace:
        calls.append("pack")
        return packed

    kernels = FakeKernels(calls, loaded=None if is_serving else "library")
    monkeypatch.setattr(kernel_swap, "kernels_for", lambda model: kernels)
    monkeypatch.setattr(kernel_swap, "NativeTransformer", pack)
    monkeypatch.setattr(kernel_swap, "give_back_freed_memory", lambda: calls.append("give back"))
    monkeypatch.setattr(kernel_swap, "in_thread", threads.append)
    swap = KernelSwap(cast(Transformer, SimpleNamespace(requires_grad_=lambda flag: None)))
    kernels.loaded = "library"
    if is_serving:
        assert swap.take() is None
        threads.pop()()
    assert swap.take() is packed
    assert calls == [*before, "serve"]
    threads.pop()()
    assert calls == [*before, "serve", *after]
    assert (swap.take(), threads) == (None, [])
