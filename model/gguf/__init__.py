"""GGUF files: container, block types of quantized tensors, model architectures."""
