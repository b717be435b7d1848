"""Test of the container image with a real engine: `make test-image`."""
