"""A metrics directory of a test's own."""

import pytest

from service.metrics import Metrics, prepare_directory
from tests.ops.observations import MODEL


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """What a process observes, on a fresh directory; the environment is restored afterwards."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    prepare_directory()
    return Metrics(MODEL)
