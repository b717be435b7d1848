"""Batch completion without a server equals the reference implementation."""

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.evaluation.prompts import complete_one_by_one
from model.sampling.params import SamplingParams
from service.engine.engine import complete_batch


def test_a_batch_of_completions_equals_completions_one_by_one(tiny_checkpoint: str) -> None:
    manifest = read_manifest(tiny_checkpoint)
    tokenizer = manifest.verify()
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["sdpa"])
    prompts = [tokenizer.encode("once upon a time "[: 3 + i % 14]) for i in range(40)]
    params = [SamplingParams(max_tokens=1 + i % 9, temperature=0.5 + 0.1 * (i % 5), seed=i) for i in range(40)]
    expected = complete_one_by_one(model, tokenizer, prompts, params)
    assert complete_batch(model, tokenizer, prompts, params) == expected
    assert len({len(ids) for ids in expected}) > 3
    assert complete_batch(model, tokenizer, [], []) == []
    with pytest.raises(ValueError, match="range from 999 to 999"):
        complete_batch(model, tokenizer, [[999]], params[:1])
