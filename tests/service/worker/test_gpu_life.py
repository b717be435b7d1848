"""Life of a worker on a GPU, without one: the device's name, its memory after a death, and bookkeeping on the host."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from service.config.settings import ModelSettings, SettingsError
from service.engine.execution.gpu_setup import wait_for_device_memory
from service.engine.scheduling.block_pool import BlockPool
from service.worker import engine_factory
from service.worker.devices import find_device
from service.worker.engine_factory import build_engine
from service.worker.memory_plan import ServerNeeds


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that this machine has two GPUs. Return the list of devices that were made the current device."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_a_gpu_with_a_number_becomes_the_current_device(two_gpus: list[int]) -> None:
    assert [find_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    assert two_gpus == [1]
    with pytest.raises(SettingsError, match="--device cuda:2: cuda:0 to cuda:1 are visible"):
        find_device("cuda:2")


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:01", "gpu", "MIG-5c89852c"])
def test_other_names_of_devices_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="one of several GPUs, such as cuda:1"):
        ModelSettings(checkpoint=Path("none"), device=name)


@pytest.mark.parametrize("visible", ["1", "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "GPU-8932f937"])
def test_imports_of_a_worker_keep_the_visible_devices_and_use_none(visible: str) -> None:
    """A standby has imported the engine, and must hold no device memory. Only the worker's engine initialises CUDA."""
    program = (
        "import os, sys, torch, service.worker.engine_factory; from service.config.torch_environment import "
        "set_torch_environment; set_torch_environment(); print(os.environ['CUDA_VISIBLE_DEVICES'], "
        "torch.cuda.is_initialized(), 'triton' in sys.modules)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [visible, "False", "False"]


def test_a_replacement_waits_until_the_memory_of_a_dead_worker_is_free() -> None:
    free, waits = [10, 20, 30, 40], list[float]()
    wait_for_device_memory(30, lambda: free.pop(0), waits.append)
    assert (free, waits) == ([40], [0.1, 0.1])
    waits.clear()
    with pytest.raises(ValueError, match="the GPU has 5 MiB free, and the model and its KV-cache need 7 MiB"):
        wait_for_device_memory(7 << 20, lambda: 5 << 20, waits.append)
    assert sum(waits) == pytest.approx(10)


def test_a_replacement_on_a_gpu_has_the_cache_of_the_first_worker(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is not measured again: the first worker's measurement holds, and other processes may use memory."""
    manifest, asked = read_manifest(tiny_checkpoint), list[int]()
    monkeypatch.setattr(engine_factory, "find_device", lambda wanted: "meta")  # any device that is no CPU
    monkeypatch.setattr(engine_factory, "wait_for_device_memory", lambda needed, free: asked.append(needed))
    monkeypatch.setattr(engine_factory, "load_model", lambda *args, **kwargs: 1 / 0)
    settings = ModelSettings(checkpoint=tiny_checkpoint, dtype="float32", attention="sdpa")
    for num_blocks in (0, 17, 18):
        with pytest.raises(ZeroDivisionError):
            build_engine(settings, manifest, server=ServerNeeds(standby=True, num_blocks=num_blocks))
    weights = manifest.config.num_parameters * 4
    block = settings.block_size * manifest.config.kv_bytes_per_token(4)
    assert asked == [weights + 17 * block, weights + 18 * block]


def test_a_block_costs_the_host_few_bytes() -> None:
    """2 million blocks of 16 tokens, 125 GB of the smallest model's keys and values, cost the host under 0.8 GB."""
    tracemalloc.start()
    try:
        pool = BlockPool(20_000)
        for number, block in enumerate(pool.allocate(20_000) or []):
            pool.register(block, number.to_bytes(16, "little"))
        assert tracemalloc.get_traced_memory()[0] < 400 * 20_000
    finally:
        tracemalloc.stop()
