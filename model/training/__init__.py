"""Training: from text files to a checkpoint directory. `service.engine` does not import this package."""
