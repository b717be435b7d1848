"""HTTP load client: SSE reader, workloads, objectives, report."""
