"""Fixtures that every part of the tests may use."""

from pathlib import Path

import pytest
import torch

from tests.tiny_model import save_tiny_checkpoint


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run beside each other, a thread of torch's each: threads that share a core wait for each other."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a CUDA device, leave out what is marked `gpu`; the summary counts it as deselected."""
    if torch.cuda.is_available():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint directory of random weights. Read only: copy it to damage it."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
