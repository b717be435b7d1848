"""Training data: corpora, conversations, mixture and packing."""
