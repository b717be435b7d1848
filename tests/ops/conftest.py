"""Fixture of separate metrics per test."""

import pytest

from service.metrics.recorder import Metrics
from tests.ops.observations import MODEL


@pytest.fixture
def metrics() -> Metrics:
    """Return metrics without observations."""
    return Metrics(MODEL)
