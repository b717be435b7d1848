"""Models of random weights, for benchmarks without a checkpoint: speed depends on shapes, not on trained values.

S and M have Llama's architecture, qwen3-0.6b has Qwen3's. All tie their embeddings. Tokens are bytes, then pairs
and triples of printable ASCII characters, so that completions are text. Imports torch.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import torch

from loadtest.measurement.shape_names import SHAPE_SIZES
from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import save_checkpoint
from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.nn.transformer import Transformer
from model.tokenizer.byte_level import ByteLevelTokenizer

_EOS = "<|endoftext|>"
_PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
_PRINTABLE = [bytes([byte]) for byte in range(0x20, 0x7F)]


def shape_config(name: str) -> ModelConfig:
    """Return the config of a shape, a key of `SHAPE_SIZES`."""
    is_qwen3 = name.startswith("qwen3")
    sizes: dict[str, Any] = SHAPE_SIZES[name]
    return ModelConfig(
        **sizes,
        position=PositionKind.ROTARY,
        rope_theta=1e6 if is_qwen3 else 1e4,
        norm=NormKind.RMS_NORM,
        norm_eps=1e-6 if is_qwen3 else 1e-5,
        mlp=MlpKind.SWIGLU,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=is_qwen3,
        tie_embeddings=True,
    )


def shape_tokenizer(vocab_size: int) -> ByteLevelTokenizer:
    """Return a tokenizer with tokens of one to three characters, and the end of text as the last token."""
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
    directory: Path,
    name: str,
    *,
    seed: int = 0,
    max_context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a complete checkpoint of this shape, the same for the same seed, and return the directory.

    Args:
        max_context_length: replaces the shape's.
        dtype: dtype of the weights in the file.
    """
    config = shape_config(name)
    if max_context_length is not None:
        config = dataclasses.replace(config, max_context_length=max_context_length)
    model = Transformer(config, ATTENTION_BACKENDS["sdpa"])
    model.initialize(seed)
    tokenizer = shape_tokenizer(config.vocab_size)
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key in config.parameter_shapes()}
    save_checkpoint(
        directory,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        name=f"shape-{name}",
        training={"steps": 0},
        dtype=dtype,
    )
    return directory
