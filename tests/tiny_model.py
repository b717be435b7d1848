"""Tiny checkpoint for tests: random weights, and a tokenizer of bytes and a few merges."""

from pathlib import Path

import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import save_checkpoint
from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.nn.transformer import Transformer
from model.tokenizer.byte_level import ByteLevelTokenizer

NAME = "tiny"
EOS = "<|endoftext|>"
_WORDS = (b" the", b" a", b"th", b"he", b"in", b"er", b"an", b"\xf0\x9f", b"\x98\x80", b"\xe2\x80", b" once", b"\n\n")


def tiny_tokenizer(*words: bytes) -> ByteLevelTokenizer:
    """Return a tokenizer of all bytes, a few merges (some of them parts of characters), and an end-of-text token.

    words: further tokens.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in (*_WORDS, *words):
        # tiktoken merges pairs, so a token is reachable only if all its prefixes are tokens.
        for length in range(2, len(token) + 1):
            ranks.setdefault(token[:length], len(ranks))
    return ByteLevelTokenizer(
        pattern=r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
        ranks=ranks,
        special_tokens={EOS: len(ranks)},
        eos_token_ids=(len(ranks),),
        bos_token_id=None,
    )


def tiny_config(vocab_size: int, *, max_context_length: int = 256) -> ModelConfig:
    """Return a config of two layers of width 32, grouped-query attention and rotary positions."""
    return ModelConfig(
        vocab_size=vocab_size,
        max_context_length=max_context_length,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=64,
        position=PositionKind.ROTARY,
        rope_theta=10000.0,
        norm=NormKind.RMS_NORM,
        norm_eps=1e-5,
        mlp=MlpKind.SWIGLU,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_embeddings=True,
    )


def save_tiny_checkpoint(
    directory: Path, *words: bytes, max_context_length: int = 256, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a complete checkpoint with reproducible random weights; return the directory.

    The weights have a wide spread, so that the model's distribution is far from uniform, and greedy text is not
    one token repeated. `words` are further tokens.
    """
    tokenizer = tiny_tokenizer(*words)
    config = tiny_config(tokenizer.vocab_size, max_context_length=max_context_length)
    model = Transformer(config, ATTENTION_BACKENDS["eager"])
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() > 1 else 1.0)
        for name, tensor in model.state_dict().items()
    }
    save_checkpoint(
        directory, config=config, tensors=tensors, tokenizer=tokenizer, name=NAME, training={"steps": 0}, dtype=dtype
    )
    return directory
