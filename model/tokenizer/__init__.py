"""Text to token ids and back. Torch-free."""
