"""Conversion of checkpoints: export to Hugging Face's format, import of pickled weights and of nanoGPT's ckpt.pt."""
