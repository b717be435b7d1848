"""Files of a checkpoint directory: readers with one-line errors, and the safetensors header."""
