"""What unit tests of the service share."""

from pathlib import Path

import pytest

from model.tokenizer.byte_level import ByteLevelTokenizer
from service.metrics import Metrics
from tests.tiny_model import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> ByteLevelTokenizer:
    return tiny_tokenizer()


@pytest.fixture
def metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """Metrics of a directory of their own; `service.metrics.render()` reads it."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return Metrics("tiny")
