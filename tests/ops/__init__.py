"""Tests of operations: metrics, monitoring, deployment."""
