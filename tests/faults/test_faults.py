"""Short run of the fault suite with the tiny model. `make test-faults` runs the long form."""

from pathlib import Path

import pytest

from loadtest.measurement.benchmark_program import provenance
from tests.faults.injection import FAULTS
from tests.faults.report import page
from tests.faults.suite import Plan, run
from tests.tiny_model import save_tiny_checkpoint

pytestmark = pytest.mark.slow


def test_every_response_is_correct_or_a_permitted_error_and_no_resource_leaks(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", max_context_length=2048)
    crowd = {"num_questions": 9, "num_clients": 6, "num_departures": 120, "flood": 80}
    plan = Plan(dtype="float64", seconds=0.0, seed=1, mean_seconds=0.3, **crowd)
    result = run(checkpoint, tmp_path, plan, "--kv-cache-memory", "2")
    assert result.complaints == []
    assert result.tally.num_compared > plan.num_questions
    assert set(result.fault_counts) == {fault.name for fault in FAULTS} | {"flood"}
    assert "| faults |" in page(result, provenance("tests.faults", []))
    assert result.counted["worker_restarts_total"] == sum(fault.num_deaths for fault in FAULTS)
