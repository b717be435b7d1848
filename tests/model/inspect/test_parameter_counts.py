"""Formulas and tensors give equal parameter counts, for all mechanisms."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from model.attention.kv_cache import KVCache
from model.config import ModelConfig
from model.config_enums import AttentionKind, MlpKind, NormKind, NormPlacement, PositionKind, QkNormScope
from model.inspect.parameter_counts import Formula, attention_formulas, count_parameters, kv_cache_formula
from tests.model.configs import ROTARY, VARIANTS


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Generate a random config of small sizes that ModelConfig accepts."""
    small = st.integers(1, 7)
    kv_heads, attention = draw(small), draw(st.sampled_from(AttentionKind))
    in_scores = (PositionKind.ROTARY, PositionKind.RELATIVE_BIAS, PositionKind.ALIBI, PositionKind.DISENTANGLED)
    average = attention is AttentionKind.AVERAGE
    position = draw(st.sampled_from([kind for kind in PositionKind if not average or kind not in in_scores]))
    norm = draw(st.sampled_from(NormKind))
    buckets = draw(st.integers(2, 9)) if position is PositionKind.RELATIVE_BIAS else None
    needs_distance = position in (PositionKind.RELATIVE_BIAS, PositionKind.DISENTANGLED)
    num_layers, kind, mlp_bias = draw(st.integers(1, 3)), draw(st.sampled_from(MlpKind)), draw(st.booleans())
    placement = draw(st.sampled_from(NormPlacement))
    is_parallel = placement is NormPlacement.PRE and draw(st.booleans())
    is_sparse = kind.gated and not mlp_bias and placement is NormPlacement.PRE and not is_parallel
    experts = {
        **{"num": draw(small), "num_per_token": 1, "mlp_size": draw(small), "normalizes": True},
        "dense_layers": draw(st.sampled_from([[], [0]])),
    }
    values: dict[str, Any] = {
        **{name: draw(st.integers(1, 50)) for name in ("vocab_size", "max_context_length", "hidden_size", "mlp_size")},
        "num_layers": num_layers,
        "num_heads": kv_heads * draw(small),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(small),
        "attention": attention,
        "position": position,
        "norm": norm,
        "mlp": kind,
        "mlp_bias": mlp_bias,
        "experts": experts if is_sparse else None,
        "norm_placement": placement,
        "norm_bias": draw(st.booleans()) if norm is NormKind.LAYER_NORM else True,
        "num_relative_buckets": buckets,
        "max_relative_distance": draw(st.integers(10, 60)) if needs_distance else None,
        "qk_norm": draw(st.booleans()) and not average,
        "qk_norm_scope": draw(st.sampled_from(QkNormScope)),
        "attention_out_bias": draw(st.sampled_from([None, False, True])),
        **{name: draw(st.booleans()) for name in ("attention_bias", "tie_embeddings", "embedding_norm")},
        "parallel_residual": is_parallel,
        "shares_norm": is_parallel and draw(st.booleans()),
        "position_offset": draw(st.sampled_from([None, 2])) if position is PositionKind.LEARNED else None,
    }
    return ModelConfig.from_dict({**ROTARY, **values})


@given(configs())
@example(VARIANTS["gemma4"])
def test_every_formula_equals_the_tensor_count(config: ModelConfig) -> None:
    rows = count_parameters(config)
    assert [row.name for row in rows if not row.agrees] == []
    assert sum(row.by_formula for row in rows) == config.num_parameters
    assert len({row.name for row in rows}) == len(rows)
    assert all((row.note != "") == (row.by_formula == 0) for row in rows), "nothing is nothing for a reason"


@given(configs())
def test_attention_formula_is_the_sum_of_its_matrices(config: ModelConfig) -> None:
    matrices = [row.formula.value for row in count_parameters(config) if row.name.startswith(("W_Q", "W_K", "W_V"))]
    (mixing,) = (row.formula.value for row in count_parameters(config) if row.name == "W_O")
    assert attention_formulas(config)[-1][1].value == sum(matrices) + mixing


@given(configs(), st.sampled_from([torch.float32, torch.bfloat16]))
@example(VARIANTS["gemma4"], torch.float32)
def test_kv_cache_bytes_equal_the_formula(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = KVCache(config, num_blocks=3, block_size=4, dtype=dtype, device="cpu")
    formula = kv_cache_formula(config, dtype.itemsize)
    assert formula.value == config.kv_bytes_per_token(dtype.itemsize)
    assert cache.num_bytes == 3 * 4 * formula.value


def test_attention_formulas_of_gpt2_sizes() -> None:
    """GPT-2's sizes: a head is 768·(2·64 + 64), twelve heads are 4·768² with W_O."""
    gpt2 = {"hidden_size": 768, "num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "qk_norm": False}
    formulas = dict(attention_formulas(ModelConfig.from_dict({**ROTARY, **gpt2})))
    one = formulas["one head"]
    assert (one.text, one.value) == ("d·(2·d_k + d_v)", 147_456)
    assert formulas["h heads and W_O"].value == 4 * 768 * 768
    assert formulas["this layer: multi-head"].value == 4 * 768 * 768
    shared = {**gpt2, "num_kv_heads": 1}
    ((_, multi_query),) = attention_formulas(ModelConfig.from_dict({**ROTARY, **shared}))[-1:]
    assert multi_query.value == 2 * 768 * 768 + 2 * 768 * 64


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"num_kv_heads": 4}, 2 * 4 * 16 * 4),
        ({"num_kv_heads": 1}, 2 * 1 * 16 * 4),
        ({"attention": "average", "position": "none", "num_kv_heads": 4, "qk_norm": False}, 2 * 4 * 8 * 4),
    ],
)
def test_kv_cache_formula_for_shared_heads_and_average_attention(change: dict[str, Any], wanted: int) -> None:
    assert kv_cache_formula(ModelConfig.from_dict({**ROTARY, **change}), 4).value == wanted


def test_an_unknown_tensor_is_named_in_the_error() -> None:
    class Stranger(ModelConfig):
        def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
            return {"layers.0.router.weight": (2, 2)}

    with pytest.raises(ValueError, match=r"layers\.0\.router\.weight belongs to no part"):
        count_parameters(Stranger.from_dict(ROTARY))


def test_formula_text_and_value_agree() -> None:
    a, b = Formula("a", 3), Formula("b", 4)
    assert (a * (2 * a + b)).text == "a·(2·a + b)"
    assert (a * (2 * a + b)).value == 30
    assert ((a + b) * (a + b)).text == "(a + b)·(a + b)"
