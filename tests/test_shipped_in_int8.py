"""Quality loss of int8 matrices in the shipped model, measured on held-out texts."""

from pathlib import Path

import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.evaluation.likelihood import evaluate
from model.nn.linear import Int8Linear, replace_linears
from model.tokenizer.byte_level import load_native
from tests.model.tokenizer.texts import stories

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "kvasir-20m"
_MOST = 0.01  # as a share of its bits per byte


def test_int8_raises_the_loss_by_at_most_one_percent() -> None:
    manifest, texts = read_manifest(CHECKPOINT), stories()[::32]
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    tokenizer = load_native(CHECKPOINT)
    plain = evaluate(model, tokenizer, texts).bits_per_byte
    replace_linears(model, "int8")
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    rounded = evaluate(model, tokenizer, texts).bits_per_byte
    assert rounded != plain
    assert rounded <= (1 + _MOST) * plain
