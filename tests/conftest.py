"""Fixtures that every part of the tests may use."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from model.kernels.build import CACHE
from model.kernels.loading import KERNELS
from tests.tiny_model import save_tiny_checkpoint

ROOT = Path(__file__).parent
# Files that take ten seconds or more, the longest first: the last ones that are begun are short, so that no processor
# is left with a long one when the others are done.
LONGEST = (
    "test_readme.py",
    "e2e/test_lm_eval.py",
    "e2e/test_poison.py",
    "faults/test_faults.py",
    "hostile/test_machines.py",
    "hostile/test_http.py",
    "e2e/test_lifecycle.py",
    "e2e/test_chat.py",
    "service/test_train_own_text.py",
    "hostile/test_clients.py",
    "hostile/test_bodies.py",
    "e2e/test_worker_death.py",
    "families/test_serving.py",
    "model/training/test_proof.py",
    "e2e/test_wire.py",
    "e2e/test_crowd.py",
    "loadtest/test_bench_overload.py",
    "families/test_memory.py",
    "e2e/test_completions.py",
    "e2e/test_structured.py",
    "e2e/test_access.py",
    "loadtest/test_bench_frontend.py",
    "loadtest/test_bench_service.py",
    "e2e/test_inspection.py",
)

# Examples are the same in every run, and none is too slow: Hypothesis' own bounds are times by the clock of the wall.
settings.register_profile("any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run beside each other, a thread of torch's each: threads that share a core wait for each other."""
    # A background job of a shell ignores SIGINT, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    # Compiled once on a machine, before the servers of tests would do it beside them.
    KERNELS.prepare(CACHE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first. Without a CUDA device, leave out what is marked `gpu`; the summary counts it."""
    places = {ROOT / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "LONGEST names a file that is not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands that run in this process set up logging as a process of the service does."""
    yield
    for name in ("service", "model"):
        ours = logging.getLogger(name)
        ours.handlers.clear()
        ours.setLevel(logging.NOTSET)
        ours.propagate = True


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint directory of random weights. Read only: copy it to damage it."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
