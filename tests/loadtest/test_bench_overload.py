"""bench_overload: growth of memory, and errors of Retry-After."""

import pytest
from prometheus_client.samples import Sample

from loadtest.scenarios.bench_overload import growth_per_minute, retry_after_errors


def test_growth_is_the_least_squares_slope_per_minute() -> None:
    assert growth_per_minute([(float(second), 100.0 + 0.5 * second) for second in range(20)]) == pytest.approx(30.0)
    assert growth_per_minute([(1.0, 5.0)]) == 0.0


def test_the_share_of_accurate_retry_after_values_is_read_from_the_histogram() -> None:
    name = "llm_retry_after_error_seconds"
    buckets = {"-0.5": 1.0, "0.5": 7.0, "+Inf": 8.0}
    found = retry_after_errors([Sample(f"{name}_bucket", {"le": le}, count) for le, count in buckets.items()])
    assert found == {"promises_watched": 8, "share_within_0.5_s": 0.75}
