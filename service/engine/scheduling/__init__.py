"""Scheduling of the engine: the choice of the sequences and tokens that the next step computes."""
