"""Readers of files with clear errors."""
