"""Tests that need a CUDA device; collected everywhere, run where there is one."""
