"""Servers are started once a module: a start costs seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Service, serving
from tests.tiny_model import save_tiny_checkpoint


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with default limits on the tiny model."""
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context long enough to be caught in the middle of a completion."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "long", max_context_length=8192)
