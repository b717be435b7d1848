"""Models of GGUF files: logits of every architecture equal those of the transformers library."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from model.attention.metadata import AttentionMetadata
from model.checkpoint.manifest import read_manifest
from model.checkpoint.weights import read_weights
from model.gguf.tensor_types import TENSOR_TYPES
from model.io.files import CheckpointError
from model.nn.linear import GroupedLinear, QuantizedEmbedding
from model.nn.transformer import Transformer
from tests.families.models import CASES, GEMMA_ROPES, load
from tests.families.parity_table import Record, prove
from tests.families.test_parity import LENGTHS, TOLERANCE, difference, texts
from tests.model.gguf.files import write_with_package
from tests.model.gguf.models import as_file, write_model
from tests.model.kernel_libraries import BACKENDS

# Cases whose config GGUF can express.
EXPRESSIBLE = (
    *("gpt2", "gpt2 untied", "llama mha", "llama gqa tied", "llama mqa biased", "llama wide heads", "llama linear"),
    *(
        "llama llama3",
        "llama yarn",
        "mistral",
        "mistral without window",
        "qwen2",
        "qwen2 mha tied",
        "qwen3",
        "qwen3 tied biased",
    ),
    *("gpt_neox", "gpt_neox sequential", "gpt_neox half rotary", "gpt_neox whole rotary", "gpt_neox linear"),
    *("gpt_neox tied unbiased", "gemma", "gemma mha biased", "gemma2 scaled by head size", "gemma3 all windows"),
    *("olmo2", "olmo2 gqa tied biased", "olmo2 llama3"),
    *("ernie4_5", "hunyuan", "hunyuan alpha tied", "cohere", "cohere2"),
    *("smollm3 four layers", "phi3", "phi3 windows", "phi3 partial tied", "phi3 longrope beyond"),
    *("phi3 longrope partial", "granite", "granite tied biased", "granite without multipliers"),
    *(
        "olmo3",
        "olmo3 without windows",
        "exaone4",
        "exaone4 without windows",
        "bloom",
        "falcon",
        "stablelm",
        "starcoder2",
    ),
    *("qwen3_moe", "mixtral", "olmoe probabilities", "granitemoe", "gemma4", "ministral3"),
)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # whole blocks of 256 numbers

EXPERT_SIZES = {"hidden_size": 64, "moe_intermediate_size": 96}
LAYER_INPUT_SIZES = {"hidden_size": 64, "hidden_size_per_layer_input": 64, "tie_word_embeddings": False}


def assert_parity(ours: Transformer, model: torch.nn.Module, tolerance: float = TOLERANCE) -> None:
    logits = ours(torch.cat(texts()), AttentionMetadata.uncached(LENGTHS), None).split(LENGTHS)
    with torch.no_grad():
        for mine, ids in zip(logits, texts(), strict=True):
            assert difference(mine, model(ids[None], use_cache=False).logits[0]) <= tolerance


def load_as_floats(path: Path) -> Transformer:
    """Load a model as for a GPU, where matrices are dequantized."""
    manifest = read_manifest(path)
    model = Transformer(manifest.config, BACKENDS["sdpa"])
    placements = manifest.placements
    model.load_state_dict(read_weights(placements, manifest.config, device="cpu", dtype=torch.float32))
    return model.eval().requires_grad_(False)


def with_float_weights(model: Transformer) -> Transformer:
    """Replace quantized matrices, which round weights or inputs to 8 bits, by the stored weights in float32."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedEmbedding) and isinstance(module.linear, GroupedLinear):
            model.set_submodule(name, torch.nn.Embedding.from_pretrained(module.linear.weight.dense()))
        elif isinstance(module, GroupedLinear) and not name.startswith("token_embedding"):
            weight_FI = module.weight.dense()
            linear = torch.nn.Linear(weight_FI.shape[1], weight_FI.shape[0], bias=module.bias_F is not None)
            linear.weight.data = weight_FI
            if module.bias_F is not None:
                linear.bias.data = module.bias_F
            model.set_submodule(name, linear)
    return model.requires_grad_(False)


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str, record_property: Record) -> None:
    prove(record_property, CASES[case].family, "GGUF")
    model = CASES[case].build()
    assert_parity(load(write_model(tmp_path / "m.gguf", model)), model)


@pytest.mark.parametrize(
    ("case", "sizes", "part", "num_kept", "type_name"),
    [
        ("qwen3_moe", EXPERT_SIZES, "experts", 2 * 3 * 6, "Q8_0"),  # two matrices of each expert of each layer
        ("qwen3_moe", EXPERT_SIZES, "experts", 2 * 3 * 6, "Q4_1"),
        ("gemma4", LAYER_INPUT_SIZES, "layer_input", 1 + 2 * 5, "Q4_0"),  # a projection, and two matrices of each layer
    ],
)
def test_quantized_matrices_of_a_part_stay_quantized(
    tmp_path: Path, case: str, sizes: dict[str, int], part: str, num_kept: int, type_name: str
) -> None:
    model = CASES[case].build(**sizes)
    path = write_model(tmp_path / "m.gguf", model, type_name=type_name)
    ours = load(path)
    kept = [name for name, module in ours.named_modules() if isinstance(module, GroupedLinear) and part in name]
    assert len(kept) == num_kept
    floats = load_as_floats(path)
    ids = texts()[0]
    metadata = AttentionMetadata.uncached((len(ids),))
    assert difference(with_float_weights(ours)(ids, metadata, None), floats(ids, metadata, None)) <= 10 * TOLERANCE


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
@pytest.mark.parametrize("case", ["llama wide heads", "qwen3"])
def test_logits_of_every_type_equal_those_of_the_dequantized_model(tmp_path: Path, case: str, type_name: str) -> None:
    path = write_model(tmp_path / "m.gguf", model := CASES[case].build(**WIDE), type_name=type_name)
    assert_parity(load_as_floats(path), as_file(path, model))
    assert_parity(with_float_weights(load(path)), model, 10 * TOLERANCE)
    manifest = read_manifest(path)
    is_quantized = manifest.quantization is not None and manifest.quantization.text.endswith(f"from GGUF's {type_name}")
    assert is_quantized == (TENSOR_TYPES[type_name].is_quantized)
    assert (manifest.name, manifest.num_weight_bytes) == ("tiny", path.stat().st_size)
    assert manifest.weight_files == [path]


@pytest.mark.parametrize(
    ("types", "bits", "text"),
    [
        ({"attn_v": "Q8_0"}, 8, "int4 and int8 in groups of 32, from GGUF's Q4_0, Q8_0"),
        ({"attn_v": "Q4_1"}, 4, "int4 in groups of 32, from GGUF's Q4_0, Q4_1"),
        ({"attn_v": "F16"}, None, "int4 in groups of 32, from GGUF's Q4_0"),
    ],
)
def test_parts_of_different_types_get_the_widest(
    tmp_path: Path, types: dict[str, str], bits: int | None, text: str
) -> None:
    model = CASES["llama wide heads"].build(hidden_size=64)  # with one group, an output has one scale
    path = write_model(tmp_path / "m.gguf", model, type_name="Q4_0", types=types)
    manifest = read_manifest(path)
    assert manifest.quantization is not None
    assert manifest.quantization.text == text
    assert_parity(load_as_floats(path), as_file(path, model))
    ours = load(path)
    linear = ours.get_submodule("layers.0.attention.qkv")
    assert (linear.weight.bits if isinstance(linear, GroupedLinear) else None) == bits
    assert_parity(with_float_weights(ours), model, 10 * TOLERANCE)


def test_a_file_without_a_name_is_named_after_itself(tmp_path: Path) -> None:
    path = write_model(tmp_path / "my model.gguf", CASES["llama mha"].build(), name=None)
    assert read_manifest(path).name == "my model"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "mamba"}, "the architecture 'mamba' is not supported; supported are llama, qwen2"),
        ({"split.count": 3}, "is one of a model's several files; merge them with"),
        ({"llama.context_length": None}, "the metadata key llama.context_length is missing"),
        ({"llama.attention.head_count": 0}, "the metadata key llama.attention.head_count is missing"),
        ({"llama.attention.head_count": -1}, "num_attention_heads must be a positive integer"),
        ({"llama.attention.head_count": "4"}, "malformed"),
        ({"llama.embedding_length": 36}, "has shape .300, 32., but the config requires .300, 36."),
        ({"llama.feed_forward_length": [48, 40, 48]}, "llama.feed_forward_length is empty or differs between layers"),
        ({"llama.attention.value_length": 4}, "keys and values have different sizes"),
        ({"llama.expert_count": 8}, "the metadata key llama.expert_used_count is missing"),
        ({"llama.expert_shared_count": 1}, "expert_shared_count=1: unknown key"),
        ({"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 4.0}, "rope_type='ntk': supported"),
        ({"llama.rope.dimension_count": 4}, "partial_rotary_factor=0.5.*rotates whole heads"),
        ({"llama.rope.freq_base": -math.nan}, r"llama\.rope\.freq_base has the value nan"),
        ({"llama.rope.freq_base": math.inf}, r"llama\.rope\.freq_base has the value inf"),
        ({"llama.expert_gating_func": 2}, "expert_gating_func=2: unknown key"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal is false; use a decoder-only model"),
    ],
)
def test_unsupported_metadata_is_rejected(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), changes=changes)
    with pytest.raises(CheckpointError, match=problem):
        read_manifest(path).verify()


def test_keys_that_state_a_default_are_accepted(tmp_path: Path) -> None:
    """Files of dense Granite 4 also have the sizes of SSM layers and of a shared expert."""
    model = CASES["granite"].build()
    sizes = ("ssm.conv_kernel", "ssm.inner_size", "ssm.time_step_rank", "expert_shared_feed_forward_length")
    stated = {"attention.causal": True, "expert_gating_func": 1, "rope.scaling.finetuned": True}
    changes = {f"granite.{key}": value for key, value in [*stated.items(), *((key, 4) for key in sizes)]}
    path = write_model(tmp_path / "m.gguf", model, changes=changes)
    assert read_manifest(path).config == read_manifest(write_model(tmp_path / "n.gguf", model)).config


def test_an_unknown_split_of_texts_is_a_warning(tmp_path: Path) -> None:
    for number, (pre, is_known) in enumerate(((None, False), ("gpt-2", True))):
        changes = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
        path = write_model(tmp_path / f"{number}.gguf", CASES["llama mha"].build(), changes=changes)
        warnings = read_manifest(path).config_warnings
        assert len(warnings) == (0 if is_known else 1)
        assert all("tokenizer.ggml.pre is missing, so texts are split as by GPT-2" in warning for warning in warnings)


def test_granite_without_rotary_embeddings_is_rejected(tmp_path: Path) -> None:
    changes = {"granite.rope.scaling.finetuned": False}
    path = write_model(tmp_path / "m.gguf", CASES["granite"].build(), changes=changes)
    with pytest.raises(CheckpointError, match=r"finetuned is false, which for Granite means no rotary embedding"):
        read_manifest(path)


def test_a_huge_number_of_layers_takes_no_memory(tmp_path: Path) -> None:
    """The array of MLP sizes is not compared with a list of that length."""
    changes = {"gemma4.block_count": 2**31 - 1}
    path = write_model(tmp_path / "m.gguf", CASES["gemma4"].build(), changes=changes)
    with pytest.raises(CheckpointError, match="must be the same in all layers, or twice as large in the last 2"):
        read_manifest(path)


def test_one_value_for_every_layer_is_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), changes={"llama.expert_count": 0})
    before = read_manifest(path).config
    changed = {"llama.feed_forward_length": [48, 48, 48], "llama.attention.head_count_kv": [4] * 3}
    path = write_model(tmp_path / "n.gguf", CASES["llama mha"].build(), changes=changed)
    assert read_manifest(path).config == before


@pytest.mark.parametrize(("num_layers", "period"), [(7, None), (4, 2)])
def test_layers_of_gemma3_without_a_window_follow_the_period(
    tmp_path: Path, num_layers: int, period: int | None
) -> None:
    own = {} if period is None else {"sliding_window_pattern": period}
    model = CASES["gemma3 all windows"].build(num_hidden_layers=num_layers, rope_parameters=GEMMA_ROPES, **own)
    changes = {"gemma3.attention.sliding_window_pattern": period}
    assert_parity(load(write_model(tmp_path / "m.gguf", model, changes=changes)), model)


@pytest.mark.parametrize(("case", "num_layers"), [("gemma2 scaled by head size", 46), ("gemma3 all windows", 62)])
def test_scores_of_the_largest_gemma_are_scaled_by_hidden_size_over_heads(
    tmp_path: Path, case: str, num_layers: int
) -> None:
    for layers, scale in ((num_layers, 8**-0.5), (num_layers - 1, None)):
        path = write_model(tmp_path / f"{layers}.gguf", CASES[case].build(num_hidden_layers=layers))
        assert read_manifest(path).config.score_scale == scale


def test_a_scaling_that_is_not_llama3s_is_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), divisors=np.array([1, 2, 1, 2], np.float32))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not a scaling of Llama 3 or Gemma 4"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("divisors", "problem"),
    [
        ([1.0] * 5, r"has the type F32 and the shape \(5,\), not F32 and \(4,\)"),
        ([0.0] * 4, "is not a scaling of Llama 3 or Gemma 4"),
        ([1.0, 1.0, 1.0, -math.nan], "has the value nan"),
    ],
)
def test_malformed_divisors_are_rejected(tmp_path: Path, divisors: list[float], problem: str) -> None:
    numbers = np.array(divisors, np.float32)
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), divisors=numbers)
    with pytest.raises(CheckpointError, match=rf"rope_freqs\.weight.* {problem}"):
        read_manifest(path)


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), divisors=np.ones(4, np.float32))
    assert read_manifest(path).config.rope_scaling is None


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.1.ffn_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), left_out=name)
    with pytest.raises(CheckpointError, match=f"tensor {name} is"):
        dict(read_manifest(path).placements)


def test_numbers_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build(), type_name="Q8_0")
    (tensor,) = (t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "blk.0.attn_q.weight")
    tensor.data[3, :2] = (0, 0x7C)  # an infinite scale
    del tensor
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight holds NaN or infinity"):
        load(path)


def test_a_file_that_was_truncated_after_its_header_was_read_is_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", CASES["llama mha"].build())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 32)
    with pytest.raises(CheckpointError, match="ends at byte"):
        read_manifest(path)


def test_a_file_without_an_architecture_is_rejected(tmp_path: Path) -> None:
    path = write_with_package(tmp_path / "m.gguf", {}, {"token_embd.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"the metadata key llama\.context_length is missing"):
        read_manifest(path)
