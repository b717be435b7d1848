"""Evaluation of model quality, with the same metrics in training and in `kvasir eval`."""
