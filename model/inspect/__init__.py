"""Inspection of a model: attention weights and parameter counts."""
