"""Shell script that runs all tests and benchmarks that need a GPU."""
