"""Other people's checkpoints, against the transformers library: the independent implementation of every family."""
