"""Models of random weights, for benchmarks without a checkpoint: speed depends on shapes, not on trained values.

Torch is imported only to write a checkpoint. Shapes named after Qwen2 and Qwen3 have their architecture, and Gemma's
sizes have Qwen3's, which every compared engine can run. The other shapes have Llama's. "qwen3-moe" has half
of Qwen3-30B-A3B's widths and heads, a third of its layers, a quarter of its experts and a smaller vocabulary.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any, Final

from model.checkpoint.manifest import CONFIG_FILE, write_manifest
from model.config import ModelConfig
from model.config_enums import Experts, MlpKind, NormKind, PositionKind
from model.io.files import write_json
from model.tokenizer.byte_level import ByteLevelTokenizer, save_native

_SIZES = (
    *("vocab_size", "max_context_length", "num_layers", "hidden_size"),
    *("num_heads", "num_kv_heads", "head_dim", "mlp_size"),
)
# The sizes of published models, except for contexts, which limit the KV-cache and do not change speed. S, M and
# qwen3-moe are no published models. Source: config.json of each model on https://huggingface.co
SHAPE_SIZES: Final[dict[str, dict[str, int]]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "S": (8192, 2048, 8, 512, 8, 4, 64, 1408),
        "M": (32000, 2048, 12, 768, 12, 12, 64, 2048),
        "smollm2-135m": (49152, 8192, 30, 576, 9, 3, 64, 1536),
        "gemma-3-270m": (262144, 8192, 18, 640, 4, 1, 256, 2048),
        "qwen3-0.6b": (151936, 8192, 28, 1024, 16, 8, 128, 3072),
        "llama-3.2-1b": (128256, 8192, 16, 2048, 32, 8, 64, 8192),
        "qwen3-moe": (32000, 8192, 16, 1024, 16, 2, 128, 3072),
        "qwen2-1.5b": (151936, 8192, 28, 1536, 12, 2, 128, 8960),
        "qwen3-1.7b": (151936, 8192, 28, 2048, 16, 8, 128, 6144),
    }.items()
}
_EXPERTS = {"qwen3-moe": Experts(num=32, num_per_token=4, mlp_size=384, normalizes=True)}
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
        qk_norm=name.startswith(("qwen3", "gemma")),
        tie_embeddings=True,
        experts=_EXPERTS.get(name),
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

    from model.checkpoint.loading import check_writable
    from model.checkpoint.weights import write_shards
    from model.nn.transformer import initialize_parameter

    config, stored = shape_config(name), getattr(torch, dtype)
    if max_context_length is not None:
        config = dataclasses.replace(config, max_context_length=max_context_length)
    shapes, generator = config.parameter_shapes(), torch.Generator().manual_seed(0)

    def tensor(key: str) -> torch.Tensor:
        return initialize_parameter(key, torch.empty(shapes[key]), config, generator).to(stored)

    check_writable(directory)
    num_bytes = {key: math.prod(shape) * stored.itemsize for key, shape in shapes.items()}
    write_shards(directory, num_bytes, map(tensor, shapes))  # the tensors of one file are in memory at a time
    write_json(directory / CONFIG_FILE, config.to_dict())
    save_native(shape_tokenizer(config.vocab_size), directory)
    write_manifest(directory, name=f"shape-{name}", training={"steps": 0})
    return directory
