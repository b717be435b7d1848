"""Servers shared by the tests of a module, because a start takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Service, serving
from tests.tiny_model import save_tiny_checkpoint


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service with the tiny model and default limits."""
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny model with a context of 8,192 tokens, so that a test can act during a completion."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "long", max_context_length=8192)
