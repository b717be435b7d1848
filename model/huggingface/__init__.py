"""Checkpoints in Hugging Face's format."""
