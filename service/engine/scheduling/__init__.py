"""Scheduling of the engine: choice of the sequences and tokens that the next step computes."""
