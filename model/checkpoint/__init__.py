"""Checkpoint directories: manifest, loading, saving, conversion."""
