"""Tests of checkpoints in Hugging Face's and nanoGPT's formats, against the transformers library."""
