"""The held-out loss: see `model.evaluation.held_out`."""

from model.evaluation.held_out import HeldOut, evaluate

__all__ = ["HeldOut", "evaluate"]
