"""Buffered observations of a histogram equal observations one by one."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from service.metrics.recorder import HistogramBuffer

# Sums of these values are exact in any order.
BOUNDS = (0.125, 0.25, 0.5)
VALUES = [(0.0625, 2), (0.125, 1), (0.1875, 3), (0.25, 1), (0.375, 4), (0.5, 2), (7.0, 1)]


def exposed(*, buffered: bool) -> bytes:
    registry = CollectorRegistry()
    histogram = Histogram("gaps", "Gaps.", buckets=BOUNDS, registry=registry)
    buffer = HistogramBuffer(histogram)
    for value, count in VALUES:
        if buffered:
            buffer.observe(value, count)
        else:
            for _ in range(count):
                histogram.observe(value)
    buffer.flush()
    buffer.flush()
    lines = generate_latest(registry).splitlines()
    return b"\n".join(line for line in lines if not line.startswith(b"#") and b"_created" not in line)


def test_buffered_observations_equal_observations_one_by_one() -> None:
    assert exposed(buffered=True) == exposed(buffered=False)
    assert b'gaps_bucket{le="0.25"} 7.0' in exposed(buffered=True)
