"""Tiny checkpoint with a chat template, ChatML's special tokens and a BOS token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.chat.chatml import END, START
from model.checkpoint.loading import save_checkpoint
from model.nn.transformer import Transformer
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.training.data.bpe import END_OF_TEXT, SPLIT_PATTERN
from tests.tiny_model import tiny_config, tiny_tokenizer

NAME = "tiny-talker"
GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}


def chatml_tokenizer(*marks: str) -> ByteLevelTokenizer:
    """Return a tokenizer of bytes, a few merges, merged line breaks, three special tokens, and marks as more."""
    ranks = dict(tiny_tokenizer().ranks)
    for token in (b"us", b"se", b"er\n", b"st", b"nt", b"\n\n\n", b"  ", b" \n"):
        ranks.setdefault(token, len(ranks))
    begin = len(ranks)
    return ByteLevelTokenizer(
        pattern=SPLIT_PATTERN,
        ranks=ranks,
        special_tokens={name: begin + number for number, name in enumerate((END_OF_TEXT, START, END, *marks))},
        eos_token_ids=(begin, begin + 2),
        bos_token_id=begin,
    )


def save_chatml_checkpoint(
    directory: Path, *marks: str, generation: Mapping[str, Any] | None = GENERATION, max_context_length: int = 256
) -> Path:
    """Save a checkpoint with reproducible random weights; return its directory. `marks` are more special tokens."""
    tokenizer = chatml_tokenizer(*marks)
    config = tiny_config(tokenizer.vocab_size, max_context_length=max_context_length)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() > 1 else 1.0)
        for name, tensor in Transformer(config, ATTENTION_BACKENDS["eager"]).state_dict().items()
    }
    save_checkpoint(
        directory,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        name=NAME,
        training={"steps": 0},
        generation=generation,
    )
    return directory
