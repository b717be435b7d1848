"""Conversion of other formats to checkpoint directories."""
