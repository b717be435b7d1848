"""The load test under test: reader, workloads, reports, locust and benches."""
