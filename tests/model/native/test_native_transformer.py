"""The native transformer equals PyTorch's for every mechanism, on every CPU level, and is batch-invariant."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.config import ModelConfig
from model.inspect.attention_weights import weights_of_layer
from model.native.native_transformer import NativeTransformer, computes
from model.native.weight_packing import BLOCK, pack, padded
from model.nn.grouped_weight import GroupedWeight
from model.nn.linear import LINEAR_KINDS, QuantizedEmbedding, make_grouped_linear, replace_linears
from model.system.memory_pages import HugePages
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of
from tests.model.nn.test_grouped_weight import grouped, normal

NATIVE = [name for name, config in VARIANTS.items() if config.attention == "softmax"]
BEST, OTHERS = list(BUILDABLE)[:1], list(BUILDABLE)[1:]
# One variant for each branch outside of the matrix products, which alone differ between levels.
SOME = ["rotary-gqa", "gpt2", "neox", "olmo2"]
CASES = [(level, variant) for level in BEST for variant in NATIVE] + list(itertools.product(OTHERS, SOME))
# Mean differences due to float32 rounding between matrices, in units of logits, whose spread is about one.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03}
IDS = torch.arange(3, 43) % 300
METADATA = AttentionMetadata.uncached((17, 23))


def twins(variant: str, level: str, dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    """Return the logits (tokens, vocabulary) of two texts, by PyTorch and by the native kernels."""
    theirs, ours = (build(VARIANTS[variant]).to(dtype) for _ in range(2))
    if kind != "plain":
        replace_linears(theirs, kind)
        replace_linears(ours, kind)
    with torch.inference_mode():
        native = NativeTransformer(ours, library_of(level))
        return theirs(IDS, METADATA, None), native(IDS, METADATA, None)


@pytest.mark.parametrize(("level", "variant"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_pytorchs_for_every_mechanism_and_level(variant: str, level: str, dtype: torch.dtype) -> None:
    theirs, ours = twins(variant, level, dtype, "plain")
    assert ours.dtype == torch.float32
    assert (theirs - ours).abs().mean() < TOLERANCES[dtype] * theirs.std()


@pytest.mark.parametrize("level", BEST)
def test_matrices_packed_for_onednn_are_packed_for_the_kernels(level: str) -> None:
    theirs, ours = twins("rotary-gqa", level, torch.float32, "packed")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("variant", [*SOME, "alibi", "gemma", "smollm3", "phi3", "granite", "experts"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_logits_equal_pytorchs_on_every_level(variant: str, level: str, kind: str) -> None:
    """Inputs that differ in their last bits may be quantized differently, hence the tolerance."""
    theirs, ours = twins(variant, level, torch.float32, kind)
    assert (theirs - ours).abs().mean() < 0.01 * theirs.std()


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_batch_and_threads(level: str, kind: str, dtype: torch.dtype) -> None:
    """Logits of each text alone (also of one token) and of all texts together, with one and with three threads."""
    model = build(VARIANTS["rotary-gqa"]).to(dtype)
    if kind != "plain":
        replace_linears(model, kind)
    native = NativeTransformer(model, library_of(level))
    lengths = (1, 2, 1, 7, 1, 29)
    texts = IDS[:1].repeat(sum(lengths)).add(torch.arange(sum(lengths))).split(lengths)
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            alone = [native(text, AttentionMetadata.uncached((len(text),)), None) for text in texts]
            for threads in (1, 3):
                torch.set_num_threads(threads)
                together = native(torch.cat(texts), AttentionMetadata.uncached(lengths), None)
                for text, expected in zip(together.split(lengths), alone, strict=True):
                    # PyTorch computes attention here: exact for a text of one token, but batch-
                    # dependent for longer texts
                    if len(text) == 1:
                        assert torch.equal(text, expected)
                    torch.testing.assert_close(text, expected, rtol=1e-4, atol=1e-4 if kind == "plain" else 0.1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("count", [1, 2, 6, 7, 97, 200])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_logits_of_any_number_of_rows_equal_pytorchs(level: str, count: int, kind: str) -> None:
    """Compare `logits`, the final norm and the LM head, for any number of rows."""
    model = build(VARIANTS["rotary-mqa-untied"]).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind in ("int8", "int4"):
        replace_linears(model, LINEAR_KINDS[kind])  # the head is int4, too
    generator = torch.Generator().manual_seed(1)
    x_RE = torch.randn(200, model.config.hidden_size, generator=generator).to(model.token_embedding.weight.dtype)
    with torch.inference_mode():
        expected = model.logits(x_RE)
        native = NativeTransformer(model, library_of(level))
        whole = native.logits(x_RE.float())
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=0.05 if kind == "bfloat16" else 1e-4)
        assert torch.equal(native.logits(x_RE[-count:].float()), whole[-count:])


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize(("bits", "inputs"), [(4, 64), (4, 70), (4, 100), (8, 70), (8, 100), (6, 512)])
def test_grouped_weights_of_any_size_equal_pytorchs(level: str, bits: int, has_offset: bool, inputs: int) -> None:
    """Compare the LM head and its use as an embedding; no sum of the kernel rounds more than PyTorch's."""
    config = ModelConfig.from_dict(VARIANTS["rotary-mqa-untied"].to_dict() | {"hidden_size": inputs})
    model, x_RE = build(config), normal(97, inputs)
    model.lm_head = make_grouped_linear(grouped(300, inputs, bits=bits, has_offset=has_offset), normal(300))
    model.token_embedding = QuantizedEmbedding(model.lm_head, torch.float32)
    with torch.inference_mode():
        expected, rows = model.logits(x_RE), model.token_embedding(IDS)
        native = NativeTransformer(model, library_of(level))
        whole = native.logits(x_RE)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(native.token_embedding(IDS), rows)
        for count in (1, 2, 3, 6, 7):
            assert torch.equal(native.logits(x_RE[-count:]), whole[-count:])


@pytest.mark.parametrize("level", BUILDABLE)
def test_experts_and_layers_of_6_bits_equal_pytorchs(level: str) -> None:
    changes = {"hidden_size": 256, "head_dim": 64, "mlp_size": 512}
    config = ModelConfig.from_dict(VARIANTS["experts"].to_dict() | changes)
    assert config.experts is not None
    theirs, ours = (build(replace(config, experts=replace(config.experts, mlp_size=256))) for _ in range(2))
    for model in (theirs, ours):
        replace_linears(
            model,
            lambda weight, bias: make_grouped_linear(
                grouped(*weight.shape, bits=6, has_offset=len(weight) > 300), bias
            ),
        )
    with torch.inference_mode():
        expected, found = theirs(IDS, METADATA, None), NativeTransformer(ours, library_of(level))(IDS, METADATA, None)
    assert (expected - found).abs().mean() < 0.01 * expected.std()


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize(("bits", "offset"), [(4, None), (4, 0.0), (6, None), (8, None)])
def test_extreme_grouped_weights_and_inputs_do_not_overflow(level: str, bits: int, offset: float | None) -> None:
    """Every code and every quantized input has its largest absolute value, with both signs."""
    size, (least, most) = 512, {4: (-8, 7), 6: (-32, 31), 8: (-127, 127)}[bits]
    model = build(ModelConfig.from_dict(VARIANTS["rotary-mqa-untied"].to_dict() | {"hidden_size": size}))
    codes_FI = torch.full((300, size), least, dtype=torch.int8)
    codes_FI[1::2] = most
    scale_FG = torch.full((300, size // 16), -128, dtype=torch.int8) if bits == 6 else torch.ones(300, size // 32)
    offset_FG = None if offset is None else offset * scale_FG
    factor_FB = torch.ones(300, size // 256, dtype=torch.float16) if bits == 6 else None
    weight = GroupedWeight(codes_FI=codes_FI, scale_FG=scale_FG, offset_FG=offset_FG, bits=bits, factor_FB=factor_FB)
    model.lm_head = make_grouped_linear(weight, None)
    x_RE = torch.ones(2, size)
    x_RE[1] = -1.0
    expected = model.logits(x_RE)
    torch.testing.assert_close(NativeTransformer(model, library_of(level)).logits(x_RE), expected)
    assert expected.abs().amin() > 7 * size * 0.99


@pytest.mark.parametrize("level", BEST)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_tied_embedding_is_in_memory_once(level: str, kind: str) -> None:
    """The native transformer keeps the packed head alone, and rejects a token without an embedding."""
    model = build(VARIANTS["rotary-gqa"])
    replace_linears(model, kind)
    head = weakref.ref(model.lm_head)
    native = NativeTransformer(model, library_of(level))
    gc.collect()
    assert head() is None
    assert not any(tensor.ndim == 2 and tensor.numel() for tensor in model.state_dict().values())
    with pytest.raises(IndexError, match="a token id is outside the vocabulary; use ids from 0 to 299"):
        native(torch.tensor([4, 300]), AttentionMetadata.uncached((2,)), None)


def test_unsupported_models_are_rejected() -> None:
    assert not computes(VARIANTS["average"], torch.float32)
    assert not computes(VARIANTS["rotary-gqa"], torch.float64)
    assert computes(VARIANTS["rotary-gqa"], torch.float32)
    for level in BEST:
        with pytest.raises(ValueError, match="do not support this model"):
            NativeTransformer(build(VARIANTS["average"]), library_of(level))


@pytest.mark.parametrize("level", BEST)
def test_packed_matrices_are_freed_in_the_module(level: str) -> None:
    """Only an embedding that is not the LM head too, and the norms of the original module, remain in memory."""
    for variant, kept in (("gpt2", {"token_embedding.weight", "position_embedding.weight"}), ("rotary-gqa", set())):
        model = build(VARIANTS[variant])
        NativeTransformer(model, library_of(level))
        matrices = {name for name, tensor in model.state_dict().items() if tensor.ndim == 2 and tensor.numel()}
        assert matrices == kept


@pytest.mark.parametrize("level", BEST)
def test_inspected_attention_weights_equal_pytorchs(level: str) -> None:
    theirs, ours = build(VARIANTS["rotary-gqa"]), build(VARIANTS["rotary-gqa"])
    native = NativeTransformer(ours, library_of(level))
    ids = IDS[:9].tolist()
    torch.testing.assert_close(weights_of_layer(native, ids, layer=1), weights_of_layer(theirs, ids, layer=1))


@pytest.mark.parametrize("level", BEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_holds_every_weight_once(level: str, dtype: torch.dtype) -> None:
    """Outputs are in zero-padded panels of 64; gate and up rows alternate in blocks of 16."""
    linear, size = torch.nn.Linear(7, 90, dtype=dtype), 4 // dtype.itemsize
    packed = pack(linear, library_of(level), HugePages())
    assert packed.outputs == padded(90) == 128
    assert packed.weight.shape == (2, -(-7 // size), 64, size)
    rows = packed.weight.transpose(1, 2).flatten(0, 1).flatten(1)
    assert torch.equal(rows[:90, :7], linear.weight)
    assert rows.count_nonzero() == linear.weight.count_nonzero()
    gated = pack(linear, library_of(level), HugePages(), gated=True)
    assert gated.weight[0, 0, 3, 0] == linear.weight[3, 0]
    assert gated.weight[0, 0, BLOCK + 3, 0] == linear.weight[45 + 3, 0]
    assert gated.weight[0, 0, 2 * BLOCK + 3, 0] == linear.weight[BLOCK + 3, 0]
    assert gated.weight.count_nonzero() == linear.weight.count_nonzero()
    assert gated.bias is not None
    assert gated.bias[BLOCK + 3] == linear.bias[45 + 3]


@pytest.mark.parametrize("level", BEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rows_of_a_tied_embedding_are_those_of_the_packed_head(level: str, dtype: torch.dtype) -> None:
    model = build(VARIANTS["rotary-gqa"]).to(dtype)
    expected = model.token_embedding(IDS)
    native = NativeTransformer(model, library_of(level))
    assert torch.equal(model.token_embedding(IDS), expected)
    assert native.token_embedding.weight.dtype == dtype


@pytest.mark.parametrize("level", BEST)
def test_one_thread_computes_the_rotations(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cosine that two threads share in a process is sometimes off by one unit in the last place."""
    model = build(VARIANTS["rotary-gqa"])
    assert model.rotary is not None
    compute, num_threads = model.rotary.forward, []

    def note(positions_T: Tensor) -> tuple[Tensor, Tensor]:
        num_threads.append(torch.get_num_threads())
        return compute(positions_T)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            native = NativeTransformer(model, library_of(level))
            monkeypatch.setattr(model.rotary, "forward", note)
            native(IDS, METADATA, None)
        assert num_threads == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
