"""Model code: transformer, KV-cache, tokenizer, sampling, checkpoints, conversion, evaluation and training.

Independent of requests, HTTP and metrics; imports nothing from `service`. "Torch-free" modules never import torch.
"""
