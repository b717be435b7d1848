"""Suite of all tests and benchmarks that need a GPU."""
