"""Logits of every family equal those of the transformers library, for whole texts and cached chunks.

Equal means: the largest absolute difference is at most 1e-5 of the largest absolute logit, in float32.
"""

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.manifest import read_manifest
from model.config_enums import MlpKind
from model.huggingface.families.table import FAMILIES
from model.native.native_transformer import NativeTransformer, to_native
from model.nn.transformer import Transformer
from tests.families.models import CASES, VOCAB_SIZE, WINDOW, load, read_by_library
from tests.model.kernel_libraries import BACKENDS
from tests.model.paging import PagedRun

TOLERANCE = 1e-5
# Dtype of the files, and maximum bytes of a shard (None: one file), by name.
STORAGES: dict[str, tuple[torch.dtype, int | None]] = {
    "float32, one file": (torch.float32, None),
    "bfloat16, shards": (torch.bfloat16, 20_000),
}
LENGTHS = (48, 33)


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return max |ours - theirs| / max |theirs|."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def expected(case: str, directory: Path, storage: str) -> list[Tensor]:
    """Save the case's model to the directory, and return the transformers library's logits of each text."""
    dtype, shard_bytes = STORAGES[storage]
    model = cast(Any, CASES[case].build()).to(dtype)
    model.save_pretrained(directory, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    assert (shard_bytes is None) == (len(list(directory.glob("*.safetensors"))) == 1)
    model = read_by_library(directory)
    with torch.no_grad():
        return [model(ids[None], use_cache=False).logits[0] for ids in texts()]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, case: str, storage: str) -> None:
    theirs = expected(case, tmp_path, storage)
    for attention in BACKENDS:
        model = load(tmp_path, attention)
        whole = model(torch.cat(texts()), AttentionMetadata.uncached(LENGTHS), None).split(LENGTHS)
        runs = {"whole": list(whole)}
        for chunk in (1, 5, 64):
            runs[f"cached, {chunk} at a time"] = PagedRun(model, texts()).forward_in_chunks(chunk)
        for run, ours in runs.items():
            for mine, reference in zip(ours, theirs, strict=True):
                assert difference(mine, reference) <= TOLERANCE, f"{attention}, {run}"


@pytest.mark.parametrize("case", CASES)
def test_native_kernels_compute_all_layers_of_every_family(tmp_path: Path, case: str) -> None:
    theirs = expected(case, tmp_path, "float32, one file")
    native = to_native(load(tmp_path, "native"))
    assert isinstance(native, NativeTransformer)
    for chunk in (1, 64):
        for mine, reference in zip(PagedRun(native, texts()).forward_in_chunks(chunk), theirs, strict=True):
            assert difference(mine, reference) <= TOLERANCE


_QWEN3_MOE = {"num": 6, "num_per_token": 3, "mlp_size": 40, "normalizes": True}
# Each mechanism changes the logits of its case, so the parity test above detects a missing mechanism.
ALTERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact gelu": ("gpt2 exact gelu", {"mlp": MlpKind.GELU}),
    "score scale": ("gpt2 unscaled", {"score_scale": None}),
    "linear": ("llama linear", {"rope_scaling": None}),
    "llama3": ("llama llama3", {"rope_scaling": None}),
    "theta": ("gpt_neox half rotary", {"rope_theta": 10000.0}),
    "window": ("mistral", {"sliding_window": None}),
    "layers that slide": ("mistral layer types", {"global_layers": (0,)}),
    "layers that do not": ("mistral full layer types", {"sliding_window": WINDOW}),
    "upper windows": ("qwen2 upper windows", {"global_layers": ()}),
    "layer types": ("qwen2 layer types", {"global_layers": (0,)}),
    "parallel": ("gpt_neox", {"parallel_residual": False}),
    "partial": ("gpt_neox half rotary", {"rotary_dim": None}),
    "embedding scale": ("gemma", {"embedding_scale": 1.0}),
    "norm offset": ("gemma", {"norm_unit_offset": False}),
    "geglu": ("gemma", {"mlp": MlpKind.SWIGLU}),
    "score soft cap": ("gemma2 low caps", {"score_soft_cap": None}),
    "logit soft cap": ("gemma2 low caps", {"logit_soft_cap": None}),
    "published score soft cap": ("gemma2", {"score_soft_cap": None}),
    "score scale of gemma": ("gemma2", {"score_scale": None}),
    "period of windows": ("gemma2", {"global_layers": ()}),
    "local theta": ("gemma3", {"local_rope_theta": None}),
    "scaling of global layers": ("gemma3", {"rope_scaling": None}),
    "norm offset of q and k": ("gemma3", {"norm_unit_offset": False}),
    "epsilon": ("olmo2", {"norm_eps": 1e-2}),
    "layers without positions": ("smollm3", {"unrotated_layers": ()}),
    "listed layers without positions": ("smollm3 listed layers", {"unrotated_layers": (1,)}),
    "window of layers without positions": ("smollm3 windows", {"global_layers": (0, 1)}),
    "partial rotary of phi3": ("phi3 partial tied", {"rotary_dim": None}),
    "window of phi3": ("phi3 windows", {"sliding_window": None}),
    "longrope": ("phi3 longrope beyond", {"rope_scaling": None}),
    "longrope within": ("phi3 longrope within", {"max_context_length": 65}),
    "multiplier of embeddings and layers": ("granite", {"embedding_scale": 12.0}),
    "epsilon of multiplied layers": ("granite", {"norm_eps": 0.05}),
    "multiplier of scores": ("granite", {"score_scale": None}),
    "normalized weights of experts": ("qwen3_moe", {"experts": {**_QWEN3_MOE, "normalizes": False}}),
    "number of experts of a token": ("qwen3_moe", {"experts": {**_QWEN3_MOE, "num_per_token": 2}}),
    "probabilities as weights": (
        "olmoe probabilities",
        {"experts": {**_QWEN3_MOE, "mlp_size": 48}},
    ),
    "window of mixtral": ("mixtral", {"sliding_window": None}),
    "partial rotary of stablelm": ("stablelm", {"rotary_dim": None}),
    "window of starcoder2": ("starcoder2", {"sliding_window": None}),
    "divisor of logits": ("granite", {"logit_divisor": 1.0}),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_the_parity_cases_detect_a_changed_mechanism(tmp_path: Path, name: str) -> None:
    case, changes = ALTERATIONS[name]
    theirs = expected(case, tmp_path, "float32, one file")
    model = load(tmp_path)
    altered = Transformer(dataclasses.replace(model.config, **changes), ATTENTION_BACKENDS["sdpa"])
    altered.load_state_dict(model.state_dict())
    altered.requires_grad_(False)
    ours = altered(texts()[0], AttentionMetadata.uncached(LENGTHS[:1]), None)
    assert difference(ours, theirs[0]) > 20 * TOLERANCE


def test_float16_files_are_loaded(tmp_path: Path) -> None:
    CASES["llama mha"].build().half().save_pretrained(tmp_path)
    model = read_by_library(tmp_path)
    ids = texts()[0]
    ours = load(tmp_path)(ids, AttentionMetadata.uncached((len(ids),)), None)
    with torch.no_grad():
        assert difference(ours, model(ids[None]).logits[0]) <= TOLERANCE


def test_every_family_has_a_parity_case() -> None:
    assert {case.family for case in CASES.values()} == set(FAMILIES)


# The library saves Gemma 3 with a vision tower under the same names with and without its head.
TIED = [
    name for name, case in CASES.items() if case.build().config.tie_word_embeddings and case.family not in ("gemma3",)
]


@pytest.mark.parametrize("case", TIED)
def test_tensor_names_without_the_family_prefix_are_read(tmp_path: Path, case: str) -> None:
    """The first GPT-2 checkpoints were saved from the bare model, without the head, which is tied to the embedding."""
    model = cast(Any, CASES[case].build())
    model.base_model.save_pretrained(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.family is not None
    names = [header.name for place in manifest.placements.values() for header in place.parts]
    assert not any(name.startswith(manifest.family.prefix) for name in names)
    ids = texts()[0]
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    assert difference(load(tmp_path)(ids, AttentionMetadata.uncached((len(ids),)), None), theirs) <= TOLERANCE
