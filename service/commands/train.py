"""`kvasir train`."""

from model.training.train import main

__all__ = ["main"]
