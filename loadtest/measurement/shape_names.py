"""Model shapes that can be measured without a checkpoint. Torch-free.

`loadtest.measurement.model_shapes` builds the models.
"""

from typing import Final

SHAPE_SIZES: Final[dict[str, dict[str, int]]] = {
    "S": {
        "vocab_size": 8192,
        "max_context_length": 2048,
        "num_layers": 8,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 64,
        "mlp_size": 1408,
    },
    "M": {
        "vocab_size": 32000,
        "max_context_length": 2048,
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_dim": 64,
        "mlp_size": 2048,
    },
    # Source: https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json. The context is 2,048 instead of 40,960
    # positions, as in the other shapes: it limits the KV-cache and does not change speed.
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "max_context_length": 2048,
        "num_layers": 28,
        "hidden_size": 1024,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "mlp_size": 3072,
    },
}
