"""Reading and writing of a checkpoint directory's files, with one-line errors, and of safetensors headers."""
