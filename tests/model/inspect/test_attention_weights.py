"""Inspected attention weights equal those of the forward pass, for every mechanism."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.inspect.attention_weights import weights_of_layer
from model.nn.transformer import Block, Transformer
from tests.model.configs import VARIANTS, attention_layers, build

TOKENS = list(range(3, 25))


class Spy:
    """Fused attention backend that records the values and outputs of each layer."""

    def __init__(self) -> None:
        self.passed: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        form: AttentionForm,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        fused = ATTENTION_BACKENDS["sdpa"]
        out_THD = fused.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
        self.passed[form.layer] = (v_TKD, out_THD)
        return out_THD


def logits(model: Transformer) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor(TOKENS), AttentionMetadata.uncached((len(TOKENS),)), None)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_times_values_equal_the_fused_attention_output(name: str) -> None:
    model, spy = build(VARIANTS[name]), Spy()
    for attention in attention_layers(model):
        attention.backend = spy
    logits(model)
    assert len(spy.passed) == model.config.num_layers
    for layer, (v_TKD, out_THD) in spy.passed.items():
        weights_HTS = weights_of_layer(model, TOKENS, layer=layer)
        v_THD = v_TKD.repeat_interleave(model.config.num_queries_per_kv_head, dim=1)
        assert_close(torch.einsum("hts,shd->thd", weights_HTS, v_THD), out_THD)


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_rows_sum_to_one_within_mask_and_window(name: str) -> None:
    config = VARIANTS[name]
    model = build(config)
    for layer in range(config.num_layers):
        weights_HTS = weights_of_layer(model, TOKENS, layer=layer)
        assert weights_HTS.shape == (config.num_heads, len(TOKENS), len(TOKENS))
        assert weights_HTS.dtype == torch.float32
        assert_close(weights_HTS.sum(-1), torch.ones(config.num_heads, len(TOKENS)))
        assert weights_HTS.triu(1).count_nonzero() == 0
        window = config.window(layer)
        if window is not None:
            assert weights_HTS.tril(-window).count_nonzero() == 0
        assert (weights_HTS.diagonal(dim1=1, dim2=2) > 0).all()


def test_average_attention_has_equal_weights() -> None:
    weights_HTS = weights_of_layer(build(VARIANTS["average"]), TOKENS, layer=1)
    for row in range(len(TOKENS)):
        assert_close(weights_HTS[:, row, : row + 1], torch.full((4, row + 1), 1 / (row + 1)))


def test_attention_weights_do_not_depend_on_later_tokens() -> None:
    model = build(VARIANTS["rotary-gqa"])
    whole, begun = (weights_of_layer(model, TOKENS[:length], layer=1) for length in (20, 11))
    assert_close(whole[:, :11, :11], begun)


def test_attention_weights_of_heads_and_layers_differ() -> None:
    model = build(VARIANTS["gpt2"])
    first, second = (weights_of_layer(model, TOKENS, layer=layer) for layer in (0, 1))
    assert (first - second).abs().max() > 0.01
    assert (first[0] - first[1]).abs().max() > 0.01


def test_an_inspection_does_not_change_the_model() -> None:
    model = build(VARIANTS["rotary-gqa"])
    before, backends = logits(model), [attention.backend for attention in attention_layers(model)]
    weights_of_layer(model, TOKENS, layer=0)
    assert [attention.backend for attention in attention_layers(model)] == backends
    assert torch.equal(logits(model), before)


def test_layers_after_the_inspected_layer_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(VARIANTS["rotary-gqa"])
    ran: list[Any] = []
    cast(Block, model.layers[0]).mlp.register_forward_hook(lambda *_: ran.append("mlp 0"))
    model.layers[1].register_forward_pre_hook(lambda *_: ran.append("layer 1"))
    weights_of_layer(model, TOKENS, layer=0)
    assert ran == []
    weights_of_layer(model, TOKENS, layer=1)
    assert ran == ["mlp 0", "layer 1"]


def test_a_failed_inspection_restores_the_attention_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(VARIANTS["rotary-gqa"])
    backend = attention_layers(model)[0].backend
    monkeypatch.setattr("model.inspect.attention_weights.attention_weights", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        weights_of_layer(model, TOKENS, layer=0)
    assert attention_layers(model)[0].backend is backend


@pytest.mark.parametrize(
    ("token_ids", "layer", "message"),
    [
        (TOKENS, 2, "layer 2 does not exist: the model has layers 0 to 1"),
        (TOKENS, -1, "layer -1 does not exist"),
        ([], 0, "the text has 0 tokens; use a text of 1 to 64 tokens"),
        ([1] * 65, 0, "the text has 65 tokens; use a text of 1 to 64 tokens"),
        ([1, 300], 0, "the given token ids range from 1 to 300; use ids of this model's tokenizer, 0 to 299"),
        ([-1], 0, "token ids range from -1 to -1"),
    ],
)
def test_invalid_layers_and_token_ids_are_rejected(token_ids: list[int], layer: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights_of_layer(build(VARIANTS["rotary-gqa"]), token_ids, layer=layer)


def test_bfloat16_weights_are_softmaxed_in_float32() -> None:
    weights_HTS = weights_of_layer(build(VARIANTS["rotary-gqa"]).to(torch.bfloat16), TOKENS, layer=1)
    assert weights_HTS.dtype == torch.float32
    assert_close(weights_HTS.sum(-1), torch.ones(4, len(TOKENS)))
