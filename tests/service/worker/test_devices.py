"""Devices of several workers: a share of the CPUs, a GPU by number, or a MIG instance for each."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from service.config.settings import ModelSettings, SettingsError
from service.worker import devices
from service.worker.devices import take_device
from service.worker.memory_plan import ServerNeeds


def taken(index: int, *, count: int = 2, device: str = "auto") -> str:
    """Return the device that worker `index` of `count` workers takes."""
    needs = ServerNeeds(standby=False, num_blocks=0, num_workers=count, worker_index=index)
    return take_device(ModelSettings(checkpoint=Path("none"), device=device), needs).device


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pretend that this machine has 4 CPUs and no GPU. Return the sets of CPUs that a worker was bound to."""
    bound: list[Any] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    monkeypatch.setattr(devices, "usable_cpus", lambda: 4)
    monkeypatch.setattr(devices, "cpu_shares", lambda count: [{0, 1}, {2, 3}][:count])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return bound


def test_on_a_cpu_each_worker_is_bound_to_its_share(bound: list[Any]) -> None:
    assert [taken(0), taken(1, device="cpu")] == ["cpu", "cpu"]
    assert bound == [{0, 1}, {2, 3}]


def test_each_worker_takes_the_gpu_of_its_number(bound: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [taken(index) for index in (0, 1)] == ["cuda:0", "cuda:1"]
    assert taken(1, device="cpu") == "cpu"
    assert bound == [{2, 3}]


def test_each_worker_sees_the_mig_instance_of_its_number_alone(
    bound: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in (0, 1):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a, MIG-b")
        assert taken(index, device="cuda") == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == f"MIG-{'ab'[index]}"


@pytest.mark.parametrize(
    ("device", "visible", "message"),
    [
        ("cpu", "", "--devices 5 needs 5 CPUs, but 4 are available; lower --devices"),
        ("auto", "", "--devices 5 needs 5 CPUs, but 4 are available; lower --devices"),
        ("cuda", "", "--devices 5 needs 5 GPUs, but 0 are available; lower --devices"),
        ("auto", "MIG-a,MIG-b", "--devices 5 needs 5 GPUs, but 2 are available; lower --devices"),
        ("cuda:1", "", "--device cuda:1 names one GPU, but each of the --devices 5 workers needs its own;"),
    ],
)
def test_more_workers_than_devices_are_rejected(
    bound: list[Any], monkeypatch: pytest.MonkeyPatch, device: str, visible: str, message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(SettingsError, match=message):
        taken(0, count=5, device=device)
    assert not bound
