"""Models of random weights, for benchmarks without a checkpoint: speed depends on shapes, not on trained values.

Torch is imported only to write a checkpoint. Shapes named qwen have Qwen's architecture, the others Llama's.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, Final

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.tokenizer.byte_level import ByteLevelTokenizer

_SIZES = (
    *("vocab_size", "max_context_length", "num_layers", "hidden_size"),
    *("num_heads", "num_kv_heads", "head_dim", "mlp_size"),
)
SHAPE_SIZES: Final[dict[str, dict[str, int]]] = {
    "S": dict(zip(_SIZES, (8192, 2048, 8, 512, 8, 4, 64, 1408), strict=True)),
    "M": dict(zip(_SIZES, (32000, 2048, 12, 768, 12, 12, 64, 2048), strict=True)),
    # Source: https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json.
    "smollm2-135m": dict(zip(_SIZES, (49152, 8192, 30, 576, 9, 3, 64, 1536), strict=True)),
    # Source: https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json. The context is 2,048 instead of 40,960
    # positions, as in the other shapes: it limits the KV-cache and does not change speed.
    "qwen3-0.6b": dict(zip(_SIZES, (151936, 2048, 28, 1024, 16, 8, 128, 3072), strict=True)),
    # Source: https://huggingface.co/Qwen/Qwen2-1.5B/blob/main/config.json, likewise.
    "qwen2-1.5b": dict(zip(_SIZES, (151936, 2048, 28, 1536, 12, 2, 128, 8960), strict=True)),
}
_EOS = "<|endoftext|>"
_PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
_PRINTABLE = [bytes([byte]) for byte in range(0x20, 0x7F)]


def shape_config(name: str) -> ModelConfig:
    """Return the model config of a shape, given by its name in `SHAPE_SIZES`."""
    is_qwen = name.startswith("qwen")
    sizes: dict[str, Any] = SHAPE_SIZES[name]
    return ModelConfig(
        **sizes,
        position=PositionKind.ROTARY,
        rope_theta=1e6 if is_qwen else 1e4,
        norm=NormKind.RMS_NORM,
        norm_eps=1e-6 if is_qwen else 1e-5,
        mlp=MlpKind.SWIGLU,
        attention_bias=name.startswith("qwen2"),
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=name.startswith("qwen3"),
        tie_embeddings=True,
    )


def shape_tokenizer(vocab_size: int) -> ByteLevelTokenizer:
    """Return a tokenizer whose tokens are all bytes, then pairs and triples of printable ASCII characters.

    A model of random weights then generates text. The last token of the vocabulary is the end-of-text token.
    """
    pairs = (first + second for first, second in itertools.product(_PRINTABLE, repeat=2))
    triples = (b"".join(three) for three in itertools.product(_PRINTABLE, repeat=3))
    tokens = itertools.chain((bytes([byte]) for byte in range(256)), pairs, triples)
    ranks = {token: rank for rank, token in enumerate(itertools.islice(tokens, vocab_size - 1))}
    return ByteLevelTokenizer(
        pattern=_PATTERN,
        ranks=ranks,
        special_tokens={_EOS: len(ranks)},
        eos_token_ids=(len(ranks),),
        bos_token_id=None,
    )


def write_random_checkpoint(
    directory: Path, name: str, *, max_context_length: int | None = None, dtype: str = "float32"
) -> Path:
    """Write a complete checkpoint of a shape with random weights, the same in every call, and return the directory.

    max_context_length: replaces the shape's; None keeps it. dtype: torch's name of the dtype of the stored weights.
    """
    import torch

    from model.attention.backends import ATTENTION_BACKENDS
    from model.checkpoint.loading import save_checkpoint
    from model.nn.transformer import Transformer

    config = shape_config(name)
    if max_context_length is not None:
        config = dataclasses.replace(config, max_context_length=max_context_length)
    model = Transformer(config, ATTENTION_BACKENDS["sdpa"])
    model.initialize(0)
    save_checkpoint(
        directory,
        config=config,
        tensors={key: tensor for key, tensor in model.state_dict().items() if key in config.parameter_shapes()},
        tokenizer=shape_tokenizer(config.vocab_size),
        name=f"shape-{name}",
        training={"steps": 0},
        dtype=getattr(torch, dtype),
    )
    return directory
