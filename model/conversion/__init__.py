"""Conversion of checkpoints between formats. Code in a file is never run."""
