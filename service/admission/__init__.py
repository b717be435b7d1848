"""Admission control and the waiting queue."""
