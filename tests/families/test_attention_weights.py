"""Attention weights of every family equal those of the transformers library (`output_attentions`)."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from model.inspect.attention_weights import weights_of_layer
from tests.families.models import CASES, VOCAB_SIZE, load, read_by_library

LENGTH = 31


@pytest.mark.parametrize("case", CASES)
def test_attention_weights_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    CASES[case].build().save_pretrained(tmp_path)
    token_ids = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = read_by_library(tmp_path)(token_ids[None], use_cache=False, output_attentions=True).attentions
    model = load(tmp_path)
    assert len(theirs) == model.config.num_layers
    for layer, weights_1HTT in enumerate(theirs):
        ours_HTT = weights_of_layer(model, token_ids.tolist(), layer=layer)
        assert_close(ours_HTT, weights_1HTT[0], atol=1e-5, rtol=1e-4)
