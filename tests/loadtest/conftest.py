"""Fixture of a checkpoint small enough to start in a moment."""

from pathlib import Path

import pytest

from tests.tiny_model import save_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of random weights with a context of 128 tokens."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", max_context_length=128)
