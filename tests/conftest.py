"""Fixtures that every part of the tests may use."""

from pathlib import Path

import pytest

from tests.tiny_model import save_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete checkpoint directory of random weights. Read only: copy it to damage it."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
