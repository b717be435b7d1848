"""Measurement tools: provenance, spread, roofline, model shapes."""
