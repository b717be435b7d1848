"""Fixture of a separate metrics directory per test."""

import pytest

from service.metrics.recorder import Metrics, prepare_directory
from tests.ops.observations import MODEL


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """Return the metrics of a process in a fresh directory; the environment is restored afterwards."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    prepare_directory()
    return Metrics(MODEL)
