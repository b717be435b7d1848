"""The simulated device refuses what a GPU refuses, and replays only what was captured."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from model.system.triton_modules import import_with_triton
from service.engine.execution.cuda_graphs import CudaCapture
from tests.gpu.simulated_device import RefusedError, SimulatedDevice


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice() as simulated:
        yield simulated


def test_a_kernel_with_tensors_of_two_devices_is_refused(device: SimulatedDevice) -> None:
    with pytest.raises(RefusedError, match="two devices"):
        torch.ones(3, device="cuda") + torch.ones(3)


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x + torch.ones(3).to("cuda", non_blocking=True),
        lambda x: x[x > 0],
        lambda x: x[[0, 2]],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.ones(3, pin_memory=True),
        lambda x: torch.repeat_interleave(x.long()),
    ],
)
def test_a_capture_refuses_waits_and_copies_of_the_host(
    forbidden: Callable[[Tensor], Tensor], device: SimulatedDevice
) -> None:
    x = torch.ones(3, device="cuda")
    forbidden(x)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RefusedError, match="during a CUDA graph capture"),
        torch.cuda.graph(graph, None, None, "global"),
    ):
        forbidden(x)


def test_a_replay_computes_the_same_kernels_over_the_same_memory_and_numbers(device: SimulatedDevice) -> None:
    x, factor = torch.ones(3, device="cuda"), [2.0]

    def compute() -> Tensor:
        out = x * factor[0]
        out[1:] += 1
        return out

    replay = CudaCapture()(compute)
    x.fill_(5.0)
    factor[0] = 100.0
    assert replay().tolist() == [10.0, 11.0, 11.0]
    assert device.counts["captures"] == device.counts["replays"] == 1


def test_a_captured_result_is_not_computed_before_the_replay(device: SimulatedDevice) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, None, None, "global"):
        out = x + 1
    assert out.isnan().all()
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_a_pinned_copy_arrives_with_the_event_after_it(device: SimulatedDevice) -> None:
    host = torch.empty(3, pin_memory=True).copy_(torch.ones(3, device="cuda"), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    late = torch.empty(3, pin_memory=True).copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert host.isnan().all()
    event.synchronize()
    assert host.tolist() == [1.0] * 3
    assert late.isnan().all()
    assert device.counts["pageable copy"] == 0


def test_pinned_memory_may_not_change_before_its_copy_is_done(device: SimulatedDevice) -> None:
    host = torch.ones(3, pin_memory=True)
    target = torch.zeros(3, device="cuda")
    target.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    host[0] = 2.0
    target.copy_(host, non_blocking=True)
    host[0] = 3.0
    with pytest.raises(RefusedError, match="changed"):
        torch.cuda.synchronize()


def test_a_running_sum_of_a_single_row_is_refused(device: SimulatedDevice) -> None:
    torch.ones(2, 3, device="cuda").cumsum(-1)
    with pytest.raises(RefusedError, match="last bits"):
        torch.ones(1, 3, device="cuda").cumsum(-1)


@pytest.mark.triton
def test_a_kernel_reads_pinned_memory_that_stays_as_it_is(device: SimulatedDevice) -> None:
    """Other tensors of the host are refused, and pinned ones that are changed or freed before the host has waited."""
    kernels: Any = import_with_triton("model.gpu.sampling_kernels")
    logits, masks = torch.ones(1, 40, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(RefusedError, match="words is not on the GPU"):
        kernels.masked(logits, masks, torch.ones(1, 2, dtype=torch.int32))
    words = torch.ones(1, 2, dtype=torch.int32, pin_memory=True)
    allowed = [column in (0, 32) for column in range(40)]
    assert (kernels.masked(logits, masks, words) == 1).tolist() == [allowed]
    words[0] = 2
    torch.cuda.synchronize()
    kernels.masked(logits, masks, words)
    words[0] = 3
    with pytest.raises(RefusedError, match="changed"):
        torch.cuda.synchronize()
    kernels.masked(logits, masks, torch.ones(1, 2, dtype=torch.int32, pin_memory=True))
    with pytest.raises(RefusedError, match="freed"):
        torch.cuda.synchronize()


def test_waits_and_pageable_copies_are_counted(device: SimulatedDevice) -> None:
    x = torch.ones(3).to("cuda", non_blocking=True)
    assert x.sum().item() == 3.0
    assert device.counts["pageable copy"] == device.counts["wait copy in"] == device.counts["wait number"] == 1
