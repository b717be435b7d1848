"""Tests of the load test: SSE reader, workloads, reports, locustfile and benchmarks."""
