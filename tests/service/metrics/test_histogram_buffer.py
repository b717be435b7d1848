"""Gathered observations are what they would be one by one."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest, values

from service.metrics import histogram_buffer
from service.metrics.histogram_buffer import Tally

# Sums of these are exact in any order.
BOUNDS = (0.125, 0.25, 0.5)
VALUES = [(0.0625, 2), (0.125, 1), (0.1875, 3), (0.25, 1), (0.375, 4), (0.5, 2), (7.0, 1)]


def told(observe: bool) -> bytes:
    registry = CollectorRegistry()
    histogram = Histogram("gaps", "Gaps.", buckets=BOUNDS, registry=registry)
    gathered = Tally(histogram)
    for value, count in VALUES:
        if observe:
            for _ in range(count):
                histogram.observe(value)
        else:
            gathered.add(value, count)
    gathered.flush()
    gathered.flush()
    lines = generate_latest(registry).splitlines()
    return b"\n".join(line for line in lines if not line.startswith(b"#") and b"_created" not in line)


def test_gathered_observations_are_as_if_observed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)  # in no file, whatever other tests chose
    assert told(observe=False) == told(observe=True)
    assert b'gaps_bucket{le="0.25"} 7.0' in told(observe=False)


def test_much_is_told_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)
    monkeypatch.setattr(histogram_buffer, "_MOST", 3)
    registry = CollectorRegistry()
    gaps = Tally(Histogram("gaps", "Gaps.", buckets=BOUNDS, registry=registry))
    for told in (0.0, 0.0, 3.0, 3.0):
        gaps.add(0.25)
        assert registry.get_sample_value("gaps_count") == told
