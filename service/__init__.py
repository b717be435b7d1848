"""HTTP service around the engine: API process, worker process, supervision, and the `kvasir` command line."""
