"""An adapter's output equals that of the model with the adapter merged into its weights, to 1e-5 in float32."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint.lora_adapter import read_adapter
from model.checkpoint.manifest import read_manifest
from tests.families.models import CASES, load
from tests.lora.adapter_files import merge, write_adapter
from tests.lora.engines import AdaptedEngine, difference
from tests.model.kernel_libraries import BACKENDS

TOLERANCE = 1e-5
_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Family's case, target modules, and further keys of the adapter's config.
ADAPTERS: dict[str, tuple[str, list[str] | str, dict[str, Any]]] = {
    "all of llama": ("llama gqa tied", _LLAMA, {}),
    "q and v of qwen3": ("qwen3", ["q_proj", "v_proj"], {"use_rslora": True}),
    "patterns": (
        "llama mqa biased",
        r"model\.layers\.[02]\.(self_attn\.(k|o)_proj|mlp\.up_proj)",
        {"rank": 20, "rank_pattern": {r"layers\.0\.mlp\.up_proj": 7, "k_proj": 3}, "alpha_pattern": {"k_proj": 12}},
    ),
    "transposed": ("gpt2", ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    "interleaved heads": ("gpt_neox", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], {"rank": 17}),
    "fused": ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {}),
    "multiplied layers": ("granite", "all-linear", {"rank": 40}),
    "norms of outputs": ("gemma2", _LLAMA, {"rank": 1}),
    "multimodal names": ("gemma3 multimodal", r".*language_model.*\.(q|v|down)_proj", {}),
    "layers of different sizes": ("gemma4", _LLAMA, {}),
    "attention beside experts": ("qwen3_moe", _LLAMA[:4], {}),
    "gate of a plain MLP": ("starcoder2", ["c_fc", "q_proj"], {"layers_to_transform": [1]}),
}


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(250) for _ in range(length)] for length in (1, 9, 30)]


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_computes_what_its_merged_model_computes(tmp_path: Path, name: str) -> None:
    case, targets, config = ADAPTERS[name]
    base = tmp_path / "base"
    CASES[case].build().save_pretrained(base)
    directory = write_adapter(tmp_path / "adapter", base, targets, **config)
    merged = merge(base, directory, tmp_path / "merged")
    for attention in ("native", "sdpa") if "native" in BACKENDS else ("sdpa",):
        adapted = AdaptedEngine(load(base, attention), base, {"a": directory})
        expected = AdaptedEngine(load(merged, attention), base, {})
        found = adapted.run(
            *(adapted.submit_of(f"a{n}", "a", ids) for n, ids in enumerate(prompts())),
            *(adapted.submit_of(f"b{n}", "", ids) for n, ids in enumerate(prompts())),
        )
        theirs = expected.run(*(expected.submit_of(f"a{n}", "", ids) for n, ids in enumerate(prompts())))
        plain = AdaptedEngine(load(base, attention), base, {})
        theirs |= plain.run(*(plain.submit_of(f"b{n}", "", ids) for n, ids in enumerate(prompts())))
        for uid, entries in theirs.items():
            assert difference(found[uid], entries) <= TOLERANCE, (attention, uid)
        assert difference_of_logprobs(found["a2"], found["b2"]) > 100 * TOLERANCE


# A converted checkpoint does not know that its source was the text part of a multimodal model.
@pytest.mark.parametrize("name", sorted(ADAPTERS.keys() - {"multimodal names"}))
def test_a_converted_base_model_has_the_adapters_of_its_source(tmp_path: Path, name: str) -> None:
    case, targets, config = ADAPTERS[name]
    CASES[case].build().save_pretrained(tmp_path)
    directory = write_adapter(tmp_path / "adapter", tmp_path, targets, **config)
    manifest = read_manifest(tmp_path)
    expected, found = (
        read_adapter(directory, base).matrices for base in (manifest, dataclasses.replace(manifest, family=None))
    )
    assert expected.keys() == found.keys()
    for module, addition in expected.items():
        np.testing.assert_array_equal(found[module].down_RI, addition.down_RI)
        np.testing.assert_array_equal(found[module].up_FR, addition.up_FR)


def difference_of_logprobs(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> float:
    return max(abs(a - b) for (_, a), (_, b) in zip(first, second, strict=True))
