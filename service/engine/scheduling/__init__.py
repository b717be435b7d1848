"""Scheduling: which sequences and tokens the next step computes."""
