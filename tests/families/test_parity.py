"""Logits and attention weights of every family equal those of the transformers library, whole and in cached chunks.

Equal logits: the largest absolute difference is at most 1e-5 of the largest absolute logit, in float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.manifest import read_manifest
from model.config_enums import MlpKind
from model.huggingface.families.table import FAMILIES
from model.inspect.attention_weights import weights_of_layer
from model.native.native_transformer import NativeTransformer, to_native
from model.nn.transformer import Transformer
from tests.families.models import CASES, VOCAB_SIZE, WINDOW, load, read_by_library
from tests.families.parity_table import Record, prove
from tests.model.kernel_libraries import BACKENDS
from tests.model.paging import PagedRun

TOLERANCE = 1e-5
LENGTHS = (24, 17)  # several windows and blocks; both beyond the original context of the longrope cases


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return max |ours - theirs| / max |theirs|."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def whole_texts(model: Transformer) -> tuple[Tensor, ...]:
    """Return the logits of each text, computed without a KV-cache."""
    return model(torch.cat(texts()), AttentionMetadata.uncached(LENGTHS), None).split(LENGTHS)


def worst(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of a text."""
    return max(difference(mine, reference) for mine, reference in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Saved:
    """Directory of a case's model in float32, and what the transformers library computes for each text."""

    directory: Path
    logits: list[Tensor]
    attentions: list[tuple[Tensor, ...]]  # of each layer: 1HTT


@pytest.fixture(scope="module")
def save_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function that saves a case's model once for all tests."""

    @functools.cache
    def save(case: str) -> Saved:
        directory = tmp_path_factory.mktemp("case")
        CASES[case].build().save_pretrained(directory)
        library = read_by_library(directory)
        with torch.no_grad():
            outputs = [library(ids[None], use_cache=False, output_attentions=True) for ids in texts()]
        return Saved(directory, [out.logits[0] for out in outputs], [out.attentions for out in outputs])

    return save


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(
    save_case: Callable[[str], Saved], case: str, record_property: Record
) -> None:
    prove(record_property, CASES[case].family, "logprobs")
    saved = save_case(case)
    for attention in BACKENDS:
        model = load(saved.directory, attention)
        assert worst(whole_texts(model), saved.logits) <= TOLERANCE, attention
        for chunk in (1, 5, 64):
            ours = PagedRun(model, texts()).forward_in_chunks(chunk)
            assert worst(ours, saved.logits) <= TOLERANCE, f"{attention}, {chunk} at a time"


@pytest.mark.parametrize("case", CASES)
def test_native_kernels_compute_all_layers_of_every_family(
    save_case: Callable[[str], Saved], case: str, record_property: Record
) -> None:
    prove(record_property, CASES[case].family, "logprobs")
    saved = save_case(case)
    native = to_native(load(saved.directory, "native"))
    assert isinstance(native, NativeTransformer)
    for chunk in (1, 64):
        assert worst(PagedRun(native, texts()).forward_in_chunks(chunk), saved.logits) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_attention_weights_equal_those_of_transformers(save_case: Callable[[str], Saved], case: str) -> None:
    saved = save_case(case)
    model = load(saved.directory)
    assert len(saved.attentions[0]) == model.config.num_layers
    for layer, weights_1HTT in enumerate(saved.attentions[0]):
        ours_HTT = weights_of_layer(model, texts()[0].tolist(), layer=layer)
        assert_close(ours_HTT, weights_1HTT[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", {case.family: name for name, case in reversed(CASES.items())}.values())
def test_shards_in_bfloat16_are_loaded(tmp_path: Path, case: str) -> None:
    cast(Any, CASES[case].build()).bfloat16().save_pretrained(tmp_path, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    library = read_by_library(tmp_path)
    with torch.no_grad():
        theirs = [library(ids[None], use_cache=False).logits[0] for ids in texts()]
    assert worst(whole_texts(load(tmp_path)), theirs) <= TOLERANCE


_QWEN3_MOE = {"num": 6, "num_per_token": 3, "mlp_size": 40, "normalizes": True}
# Each mechanism changes the logits of its case, so the parity test above detects a missing mechanism.
ALTERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact gelu": ("gpt2 exact gelu", {"mlp": MlpKind.GELU}),
    "score scale": ("gpt2 unscaled", {"score_scale": None}),
    "rows before position 0": ("opt", {"position_offset": None, "max_context_length": 66}),
    "slopes": ("bloom", {"position": "none"}),
    "linear": ("llama linear", {"rope_scaling": None}),
    "dynamic": ("llama dynamic", {"rope_scaling": None}),
    "dynamic within": ("llama dynamic", {"max_context_length": 20}),
    "llama3": ("llama llama3", {"rope_scaling": None}),
    "yarn": ("llama yarn", {"rope_scaling": None}),
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
    "values without a norm": ("gemma4", {"value_norm": False}),
    "score scale of gemma4": ("gemma4", {"score_scale": None}),
    "lowest frequencies": ("gemma4", {"rope_scaling": None}),
    "local theta of gemma4": ("gemma4", {"local_rope_theta": 1e6}),
    "factor of frequencies": ("gemma4 without shared keys", {"rope_scaling": None}),
    "epsilon": ("olmo2", {"norm_eps": 1e-2}),
    "positions of layers with a window": ("olmo3", {"local_rope_theta": None}),
    "scaling of layers without a window": ("olmo3", {"rope_scaling": None}),
    "window of olmo3": ("olmo3", {"global_layers": ()}),
    "layers of exaone4 without positions": ("exaone4", {"unrotated_layers": ()}),
    "window of exaone4": ("exaone4", {"global_layers": ()}),
    "layers without positions": ("smollm3", {"unrotated_layers": ()}),
    "listed layers without positions": ("smollm3 listed layers", {"unrotated_layers": (1,)}),
    "window of layers without positions": ("smollm3 windows", {"global_layers": (0, 1)}),
    "norms after rotation": ("hunyuan", {"qk_norm_after_rotation": False}),
    "alpha": ("hunyuan alpha tied", {"rope_theta": 10000.0}),
    "growth of scores": ("ministral3", {"score_growth": None, "score_growth_interval": None}),
    "scale of logits": ("cohere", {"logit_divisor": 1.0}),
    "layers of cohere2 without positions": ("cohere2", {"unrotated_layers": ()}),
    "partial rotary of phi3": ("phi3 partial tied", {"rotary_dim": None}),
    "window of phi3": ("phi3 windows", {"sliding_window": None}),
    "longrope": ("phi3 longrope beyond", {"rope_scaling": None}),
    "longrope within": ("phi3 longrope within", {"max_context_length": 65}),
    "multiplier of embeddings and layers": ("granite", {"embedding_scale": 12.0}),
    "epsilon of multiplied layers": ("granite", {"norm_eps": 0.05}),
    "multiplier of scores": ("granite", {"score_scale": None}),
    "normalized weights of experts": ("qwen3_moe", {"experts": {**_QWEN3_MOE, "normalizes": False}}),
    "number of experts of a token": ("qwen3_moe", {"experts": {**_QWEN3_MOE, "num_per_token": 2}}),
    "probabilities as weights": ("olmoe probabilities", {"experts": {**_QWEN3_MOE, "mlp_size": 48}}),
    "window of mixtral": ("mixtral", {"sliding_window": None}),
    "partial rotary of stablelm": ("stablelm", {"rotary_dim": None}),
    "window of starcoder2": ("starcoder2", {"sliding_window": None}),
    "divisor of logits": ("granite", {"logit_divisor": 1.0}),
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_the_parity_cases_detect_a_changed_mechanism(save_case: Callable[[str], Saved], name: str) -> None:
    case, changes = ALTERATIONS[name]
    saved = save_case(case)
    model = load(saved.directory)
    altered = Transformer(dataclasses.replace(model.config, **changes), ATTENTION_BACKENDS["sdpa"])
    altered.load_state_dict(model.state_dict())
    altered.requires_grad_(False)
    assert difference(whole_texts(altered)[0], saved.logits[0]) > 20 * TOLERANCE


def test_float16_files_are_loaded(tmp_path: Path) -> None:
    CASES["llama mha"].build().half().save_pretrained(tmp_path)
    library = read_by_library(tmp_path)
    with torch.no_grad():
        theirs = [library(ids[None]).logits[0] for ids in texts()]
    assert worst(whole_texts(load(tmp_path)), theirs) <= TOLERANCE


def test_every_family_has_a_parity_case() -> None:
    assert {case.family for case in CASES.values()} == set(FAMILIES)


# The library saves Gemma 3 and 4 with towers under the same names with and without its head.
TIED = [
    name
    for name, case in CASES.items()
    if case.config().tie_word_embeddings and case.family not in ("gemma3", "gemma4")
]


@pytest.mark.parametrize("case", TIED)
def test_tensor_names_without_the_family_prefix_are_read(
    tmp_path: Path, save_case: Callable[[str], Saved], case: str
) -> None:
    """The first GPT-2 checkpoints were saved from the bare model, without the head, which is tied to the embedding."""
    cast(Any, CASES[case].build()).base_model.save_pretrained(tmp_path)
    manifest = read_manifest(tmp_path)
    assert manifest.family is not None
    names = [header.name for place in manifest.placements.values() for header in place.parts]
    assert not any(name.startswith(manifest.family.prefix) for name in names)
    assert worst(whole_texts(load(tmp_path)), save_case(case).logits) <= TOLERANCE
