"""Models of random weights, for measuring without a checkpoint: speed depends on shapes, not on what was learned.

Both are of Llama's architecture with tied embeddings. Tokens are bytes, then pairs, then triples of printable ASCII
characters, so that what such a model says is text. Imports torch.
"""

import dataclasses
import itertools
from pathlib import Path

from loadtest.shape_names import SHAPE_SIZES
from model.attention.interface import ATTENTION_BACKENDS
from model.checkpoint import save_checkpoint
from model.config import ModelConfig
from model.kinds import MlpKind, NormKind, PositionKind
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.transformer import Transformer

_EOS = "<|endoftext|>"
_PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
_PRINTABLE = [bytes([byte]) for byte in range(0x20, 0x7F)]


def shape_config(name: str) -> ModelConfig:
    """The model of this name, a key of `SHAPE_SIZES`."""
    return ModelConfig(
        **SHAPE_SIZES[name],
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


def shape_tokenizer(vocab_size: int) -> ByteLevelTokenizer:
    """Tokens of one to three characters, and the end of text as the last."""
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
    directory: Path, name: str, *, seed: int = 0, max_context_length: int | None = None
) -> Path:
    """A complete checkpoint of this shape, float32, the same for the same seed. Returns the directory.

    max_context_length: where it is to be another than the shape's.
    """
    config = shape_config(name)
    if max_context_length is not None:
        config = dataclasses.replace(config, max_context_length=max_context_length)
    model = Transformer(config, ATTENTION_BACKENDS["sdpa"])
    model.initialize(seed)
    tokenizer = shape_tokenizer(config.vocab_size)
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key in config.parameter_shapes()}
    save_checkpoint(
        directory, config=config, tensors=tensors, tokenizer=tokenizer, name=f"shape-{name}", training={"steps": 0}
    )
    return directory
