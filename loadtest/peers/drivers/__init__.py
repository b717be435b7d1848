"""Drivers of the compared engines, one program each."""
