"""Each mechanism against an independent source: its formula, PyTorch, or transformers."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import DebertaV2Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from model.attention.backends import ATTENTION_BACKENDS, attention_weights
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.attention.score_biases import SCORE_BIASES, AlibiBias, DisentangledBias, RelativeBias, relative_positions
from model.config import ModelConfig
from model.config_enums import PositionKind, RopeScaling, RopeScalingKind
from model.nn.position_embeddings import RotaryPositions, SinusoidalPositions, score_factors
from model.nn.transformer import Transformer
from tests.model.configs import LLAMA3, ROTARY, VARIANTS, YARN, attention_layers, build
from tests.model.kernel_libraries import BACKENDS


def distances(length: int) -> torch.Tensor:
    """Return the distances query position - key position of one whole sequence: (1, queries, positions)."""
    positions = torch.arange(length)
    return (positions[:, None] - positions)[None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 3])
def test_average_attention_is_the_mean_of_the_visible_values(backend: str, window: int | None) -> None:
    torch.manual_seed(0)
    v_TKD = torch.randn(9, 2, 8)
    nothing = torch.empty(9, 4, 0), torch.empty(9, 2, 0)
    form = AttentionForm(layer=0, scale=8**-0.5, window=window, bias=None)
    metadata = AttentionMetadata.uncached((9,))
    out_THD = BACKENDS[backend].attend(*nothing, v_TKD, form=form, metadata=metadata, kv_cache=None)
    for token in range(9):
        seen = v_TKD[0 if window is None else max(0, token - window + 1) : token + 1]
        expected = seen.mean(dim=0).repeat_interleave(2, dim=0)
        torch.testing.assert_close(out_THD[token], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_are_multi_head_with_repeated_keys_and_values(num_kv_heads: int) -> None:
    """MQA and GQA: copying the weights of a shared head for each of its query heads gives the same model."""
    grouped = build(ModelConfig.from_dict({**ROTARY, "num_kv_heads": num_kv_heads, "qk_norm": False}))
    whole = build(ModelConfig.from_dict({**ROTARY, "num_kv_heads": 4, "qk_norm": False}))
    tensors = grouped.state_dict()
    for layer in range(2):
        name = f"layers.{layer}.attention.qkv.weight"
        q, k, v = tensors[name].split([32, 8 * num_kv_heads, 8 * num_kv_heads])
        k, v = (x.unflatten(0, (-1, 8)).repeat_interleave(4 // num_kv_heads, dim=0).flatten(0, 1) for x in (k, v))
        tensors[name] = torch.cat((q, k, v))
    whole.load_state_dict(tensors)
    ids, metadata = torch.arange(20), AttentionMetadata.uncached((20,))
    torch.testing.assert_close(whole(ids, metadata, None), grouped(ids, metadata, None), atol=1e-5, rtol=1e-5)


def test_heads_are_concatenated_and_projected() -> None:
    """Multi-head attention is the concatenation of separate heads, times W_O."""
    attention = attention_layers(build(VARIANTS["gpt2"], "eager"))[0]
    x_TE, metadata = torch.randn(7, 32), AttentionMetadata.uncached((7,))
    q, k, v = attention.qkv(x_TE).split(32, dim=-1)
    heads = []
    for head in range(4):
        span = slice(8 * head, 8 * (head + 1))
        scores = (q[:, span] @ k[:, span].T / math.sqrt(8)).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, span])
    expected = torch.cat(heads, dim=-1) @ attention.out.weight.T + attention.out.bias
    torch.testing.assert_close(
        attention(x_TE, None, metadata=metadata, kv_cache=None, kv_of={}), expected, atol=1e-5, rtol=1e-5
    )


def test_why_scores_are_divided_by_the_root_of_the_head_size() -> None:
    """q·k of independent components of variance 1 has variance d_k; divided by sqrt(d_k) it has variance 1 for any d_k.

    The variance over 40,000 samples is within 5% except with a probability under 1e-6 (its standard deviation is
    below 1%). Unscaled, the softmax over 64 keys of a large head puts almost all weight on one key, and the
    gradient of the other scores almost vanishes.
    """
    generator = torch.Generator().manual_seed(0)
    gradients = {}
    for head_dim in (4, 16, 64, 256):
        q, k = torch.randn(2, 40_000, head_dim, generator=generator)
        dots = (q * k).sum(-1)
        assert dots.var().item() == pytest.approx(head_dim, rel=0.05)
        assert (dots / math.sqrt(head_dim)).var().item() == pytest.approx(1.0, rel=0.05)
        scores = (torch.randn(500, 64, head_dim, generator=generator) @ torch.randn(head_dim, generator=generator)).T
        for name, scaled in (("raw", scores.T), ("scaled", scores.T / math.sqrt(head_dim))):
            weights = scaled.softmax(-1)
            gradients[name, head_dim] = (weights * (1 - weights)).sum(-1).mean().item()
    assert gradients["raw", 256] < 0.5 * gradients["raw", 4]
    assert gradients["scaled", 256] == pytest.approx(gradients["scaled", 4], rel=0.1)


def test_the_default_score_scale_depends_on_the_number_of_products_in_a_score() -> None:
    assert VARIANTS["gpt2"].effective_score_scale == pytest.approx(8**-0.5)
    assert VARIANTS["disentangled"].effective_score_scale == pytest.approx((3 * 8) ** -0.5)
    assert VARIANTS["qwen2"].effective_score_scale == 0.2


def test_a_window_hides_positions_further_back() -> None:
    config = VARIANTS["window-one-layer"]
    assert [config.window(layer) for layer in range(2)] == [7, None]
    q_QHD, k_SKD = torch.randn(20, 4, 8), torch.randn(20, 2, 8)
    weights_HQS = attention_weights(q_QHD, k_SKD, AttentionForm(layer=0, scale=1.0, window=7, bias=None))
    seen = (distances(20)[0] >= 0) & (distances(20)[0] < 7)
    assert torch.equal(weights_HQS > 0, seen.expand(4, -1, -1))
    torch.testing.assert_close(weights_HQS.sum(-1), torch.ones(4, 20))


def test_a_soft_cap_bounds_the_scores_before_the_softmax() -> None:
    q_QHD, k_SKD = 5 * torch.randn(6, 2, 8), 5 * torch.randn(6, 2, 8)
    weights_HQS = attention_weights(q_QHD, k_SKD, AttentionForm(layer=0, scale=0.5, window=None, bias=None, soft_cap=2))
    for head in range(2):
        scores = [[2 * math.tanh(float(q @ k) * 0.5 / 2) for k in k_SKD[:, head]] for q in q_QHD[:, head]]
        masked = torch.tensor(scores).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(weights_HQS[head], masked.softmax(-1), atol=1e-5, rtol=1e-5)


def test_layers_with_a_window_may_have_rotary_positions_of_their_own() -> None:
    """With equal bases the model is that with one embedding; a scaling is of the other layers alone."""
    config, ids = VARIANTS["window-one-layer"], torch.arange(20)
    scaled = RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0)
    cases: dict[str, dict[str, Any]] = {
        "one": {},
        "equal": {"local_rope_theta": config.rope_theta},
        "local": {"local_rope_theta": 50.0},
        "scaled": {"local_rope_theta": config.rope_theta, "rope_scaling": scaled},
        "all scaled": {"rope_scaling": scaled},
    }
    logits = {}
    for name, changes in cases.items():
        model = build(dataclasses.replace(config, **changes))
        logits[name] = model(ids, AttentionMetadata.uncached((20,)), None)
    assert torch.equal(logits["equal"], logits["one"])
    others = [logits[name] for name in ("equal", "local", "scaled", "all scaled")]
    for first, second in itertools.combinations(others, 2):
        assert float((first - second).abs().max()) > 1e-3


def test_a_windows_reach_grows_with_depth() -> None:
    """Two layers with a window of 7 reach exactly 12 positions back."""
    config = ModelConfig.from_dict({**ROTARY, "sliding_window": 7})
    model = build(config)
    metadata = AttentionMetadata.uncached((20,))
    ids = torch.arange(20)
    for changed, reaches in ((19 - 12, True), (19 - 13, False)):
        other = ids.clone()
        other[changed] = 200
        difference = (model(ids, metadata, None)[-1] - model(other, metadata, None)[-1]).abs().max().item()
        assert (difference > 1e-4) is reaches


@pytest.mark.parametrize("size", [32, 48])
def test_sinusoidal_positions_are_those_of_transformers(size: int) -> None:
    """Marian's table has all sines before all cosines; the paper's table alternates them."""
    theirs = MarianSinusoidalPositionalEmbedding(100, size).create_weight()
    ours = SinusoidalPositions(size)(torch.arange(100))
    torch.testing.assert_close(torch.cat((ours[:, 0::2], ours[:, 1::2]), dim=-1), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("factor", "theta", "size"), [(8.0, 500_000.0, 128), (32.0, 500_000.0, 64), (4.0, 1e4, 16)])
def test_llama3_scaling_is_that_of_transformers(factor: float, theta: float, size: int) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, rope_parameters=parameters)
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    scaling = RopeScaling.from_dict({**LLAMA3, "factor": factor, "original_context_length": 8192})
    assert attention_factor == 1.0
    torch.testing.assert_close(RotaryPositions(size, theta, scaling).frequencies, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("factor", "theta", "size", "betas"),
    [(8.0, 500_000.0, 128, (32, 1)), (48.0, 1e8, 128, (32, 1)), (10.0, 1e4, 16, (2.0, 0.2)), (3.0, 1e4, 8, (64, 60))],
)
def test_yarn_scaling_is_that_of_transformers_bitwise(
    factor: float, theta: float, size: int, betas: tuple[float, float]
) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": 8192,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
    }
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, rope_parameters=parameters)
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    scaling = RopeScaling.from_dict(
        {**YARN, "factor": factor, "original_context_length": 8192, "beta_fast": betas[0], "beta_slow": betas[1]}
    )
    assert scaling.rotation_factor == attention_factor
    assert torch.equal(RotaryPositions(size, theta, scaling).frequencies, theirs)


def test_scores_grow_by_steps_of_the_querys_position() -> None:
    """A query is multiplied by 1 + g ln(1 + floor(p / n)): unchanged in the first n positions, larger after them."""
    config, metadata, ids = VARIANTS["ministral3"], AttentionMetadata.uncached((13,)), torch.arange(13)
    growing = build(config)
    plain = build(dataclasses.replace(config, score_growth=None, score_growth_interval=None))
    differences = (growing(ids, metadata, None) - plain(ids, metadata, None)).abs().amax(dim=1)
    assert torch.equal(differences[:5], torch.zeros(5))
    assert bool((differences[5:] > 1e-5).all())
    expected = [1.0] * 5 + [1 + 0.5 * math.log(2)] * 5 + [1 + 0.5 * math.log(3)] * 3
    torch.testing.assert_close(score_factors(torch.arange(13), 0.5, 5), torch.tensor(expected))


def test_norms_after_the_rotation_differ_only_by_their_weights() -> None:
    """A rotation keeps the length of a head, so norms with equal weights may come before or after it."""
    metadata, ids = AttentionMetadata.uncached((9,)), torch.arange(9)
    logits = {}
    for after in (False, True):
        for spread in (0.0, 0.5):
            model = build(dataclasses.replace(VARIANTS["hunyuan"], qk_norm_after_rotation=after))
            for layer in attention_layers(model):
                for norm in (layer.query_norm, layer.key_norm):
                    assert norm is not None
                    norm.weight.data = 1 + spread * torch.arange(8)
            logits[after, spread] = model(ids, metadata, None)
    torch.testing.assert_close(logits[True, 0.0], logits[False, 0.0], atol=1e-5, rtol=1e-5)
    assert float((logits[True, 0.5] - logits[False, 0.5]).abs().max()) > 1e-3


def test_a_shared_norm_is_two_equal_norms() -> None:
    config, metadata, ids = VARIANTS["cohere"], AttentionMetadata.uncached((9,)), torch.arange(9)
    shared, separate = build(config), build(dataclasses.replace(config, shares_norm=False))
    tensors = shared.state_dict()
    tensors |= {n.replace("attention_norm", "mlp_norm"): t for n, t in tensors.items() if "attention_norm" in n}
    separate.load_state_dict(tensors)
    assert torch.equal(shared(ids, metadata, None), separate(ids, metadata, None))


@pytest.mark.parametrize(("fraction", "factor", "size"), [(0.25, 1.0, 512), (0.3, 2.0, 64), (1.0, 4.0, 16)])
def test_proportional_scaling_is_that_of_transformers(fraction: float, factor: float, size: int) -> None:
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": fraction, "factor": factor}
    config = LlamaConfig(hidden_size=size, num_attention_heads=1, rope_parameters=parameters)
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu")
    scaling = RopeScaling(kind=RopeScalingKind.PROPORTIONAL, factor=factor, rotated_fraction=fraction)
    assert attention_factor == 1.0
    assert torch.equal(RotaryPositions(size, 1e6, scaling).frequencies, theirs)


def test_linear_scaling_divides_positions() -> None:
    plain = RotaryPositions(16, 1e4, None)
    stretched = RotaryPositions(16, 1e4, RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0))
    for theirs, ours in zip(plain(torch.tensor([3])), stretched(torch.tensor([12])), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 24), (7, 20)])
def test_buckets_are_those_of_t5(num_buckets: int, max_distance: int) -> None:
    change = {"num_relative_buckets": num_buckets, "max_relative_distance": max_distance}
    config = ModelConfig.from_dict({**ROTARY, "position": "relative_bias", **change})
    bias = RelativeBias(config, relative_positions(config))
    theirs = T5Attention._relative_position_bucket(
        -distances(300), bidirectional=False, num_buckets=num_buckets, max_distance=max_distance
    )
    assert torch.equal(bias.buckets(distances(300)), theirs)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 6, 8, 12, 16])
def test_alibi_is_that_of_bloom(num_heads: int) -> None:
    """BLOOM adds slope * key position, which is -slope * distance plus a constant that softmax ignores."""
    config = ModelConfig.from_dict({**ROTARY, "position": "alibi", "num_heads": num_heads, "num_kv_heads": 1})
    ours = AlibiBias(config, None)(torch.empty(0), torch.empty(0), distances(20))[0]
    theirs = build_alibi_tensor(torch.ones(1, 20), num_heads, torch.float32)  # H1S
    future = torch.ones(20, 20).triu(1).bool()
    torch.testing.assert_close(
        ours.masked_fill(future, -torch.inf).softmax(-1),
        theirs.expand(-1, 20, -1).masked_fill(future, -torch.inf).softmax(-1),
    )


def test_disentangled_attention_is_debertas_under_a_causal_mask() -> None:
    span, length = 9, 30
    theirs = DisentangledSelfAttention(
        DebertaV2Config(
            hidden_size=32,
            num_attention_heads=4,
            relative_attention=True,
            max_relative_positions=span,
            pos_att_type=["c2p", "p2c"],
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )
    ).eval()
    config = VARIANTS["disentangled"]
    model = Transformer(config, ATTENTION_BACKENDS["eager"])
    model.initialize(3)
    ours, table = attention_layers(model)[0], model.relative_positions
    assert isinstance(ours.bias, DisentangledBias)
    assert table is not None
    torch.nn.init.normal_(table.weight)
    with torch.no_grad():
        for projection, weight in zip(
            (theirs.query_proj, theirs.key_proj, theirs.value_proj), ours.qkv.weight.chunk(3), strict=True
        ):
            projection.weight.copy_(weight)
        theirs.pos_query_proj.weight.copy_(ours.bias.query.weight)
        theirs.pos_key_proj.weight.copy_(ours.bias.key.weight)
        for module in theirs.children():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.zeros_(module.bias)
        torch.nn.init.eye_(ours.out.weight)  # the other implementation has no W_O
        # the first half of the other table holds future positions
        future_and_past = torch.cat((torch.randn(span, 32), table.weight))
        x_TE = torch.randn(length, 32)
        causal = torch.ones(length, length).tril().bool()[None, None]
        expected = theirs(x_TE[None], causal, rel_embeddings=future_and_past)[0][0]
        actual = ours(x_TE, None, metadata=AttentionMetadata.uncached((length,)), kv_cache=None, kv_of={})
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("position", list(SCORE_BIASES))
def test_a_bias_in_the_scores_changes_the_weights(position: PositionKind) -> None:
    """Omitting the bias would show, since the weights of equal tokens differ only by the bias."""
    name = {"relative_bias": "relative-bias", "alibi": "alibi", "disentangled": "disentangled"}[position]
    attention = attention_layers(build(VARIANTS[name], "eager"))[0]
    q_QHD, k_SKD = torch.ones(12, 4, 8), torch.ones(12, VARIANTS[name].num_kv_heads, 8)
    weights = attention_weights(q_QHD, k_SKD, attention.form)
    assert (weights[:, -1].max(-1).values > 1.05 * weights[:, -1].min(-1).values).any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 12))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_trained_alike_by_both_backends(variant: str) -> None:
    """Compare the gradients of the next-token loss for every tensor, with the eager and the fused backend."""
    generator = torch.Generator().manual_seed(5)
    ids, targets = torch.randint(300, (2, 75), generator=generator)
    metadata = AttentionMetadata.uncached((25, 25, 25))
    gradients = []
    for backend in ATTENTION_BACKENDS.values():
        model = Transformer(VARIANTS[variant], backend)
        model.initialize(0)
        functional.cross_entropy(model(ids, metadata, None), targets).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == VARIANTS[variant].parameter_shapes().keys()
    # The final norm cancels the last layer's factor, so the factor's gradient is 0 but for rounding errors.
    cancelled = f"layers.{VARIANTS[variant].num_layers - 1}.layer_scalar"
    for name, eager in gradients[0].items():
        if name == cancelled:
            continue
        fused = gradients[1][name]
        assert eager is not None
        assert fused is not None
        assert eager.abs().max() > 0, name
        torch.testing.assert_close(fused, eager, atol=1e-5 * eager.abs().max().item(), rtol=1e-4)
