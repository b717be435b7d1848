"""Gemma 3 and 4 with towers: the language model is served, and users are informed of the parts that are not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.attention.metadata import AttentionMetadata
from model.checkpoint.manifest import read_manifest
from model.huggingface.directory import SINGLE_FILE
from service.cli.main import main
from service.config.settings import ModelSettings
from service.worker.engine_factory import build_engine
from tests.families.models import CASES, CLASSES, load, transformers
from tests.families.tokenizer_files import write_byte_level
from tests.model.kernel_libraries import BUILDABLE

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 16,
}
NEWER = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "language_model.lm_head.": "lm_head.",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    CASES["gemma3 multimodal"].build().save_pretrained(tmp_path / "seeing")
    write_byte_level(tmp_path / "seeing", 300)
    return tmp_path / "seeing"


def test_inspect_and_the_log_name_the_part_that_is_not_served(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["inspect", "--checkpoint", str(checkpoint)]) == 0
    said = "the vision tower; only the language model is loaded, and images in requests are rejected"
    assert said in capsys.readouterr().out
    values: dict[str, Any] = {"device": "cpu", "threads": torch.get_num_threads(), "kv_cache_memory": 2}
    with caplog.at_level(logging.WARNING):
        _, facts = build_engine(ModelSettings(checkpoint=checkpoint, **values), read_manifest(checkpoint))
    assert f"seeing has parts that are not served: {said}" in caplog.text
    assert facts.attention == ("native" if BUILDABLE else "sdpa")
    assert (facts.kernel_level is not None) == bool(BUILDABLE)


def test_newer_names_of_tensors_are_read(checkpoint: Path) -> None:
    ids, metadata = torch.arange(30), AttentionMetadata.uncached((30,))
    before = load(checkpoint)(ids, metadata, None)
    tensors = {}
    for name, tensor in load_file(checkpoint / SINGLE_FILE).items():
        old = next(prefix for prefix in NEWER if name.startswith(prefix))
        tensors[NEWER[old] + name.removeprefix(old)] = tensor
    save_file(tensors, checkpoint / SINGLE_FILE)
    assert torch.equal(load(checkpoint)(ids, metadata, None), before)


def test_gemma4_is_served_without_its_towers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files hold keys and values of layers that do not use them, as published files do."""
    sizes = CLASSES["gemma4"][1] | {"vision_config": VISION, "audio_config": AUDIO}
    library = transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(**sizes)).eval()
    library.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    for name, shape in (("k_proj", (16, 32)), ("v_proj", (16, 32)), ("k_norm", (16,))):
        tensors[f"model.language_model.layers.3.self_attn.{name}.weight"] = torch.ones(shape)
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    write_byte_level(tmp_path, 300)
    assert main(["inspect", "--checkpoint", str(tmp_path)]) == 0
    assert "vision and audio towers; only the language model is loaded" in capsys.readouterr().out
    ids = torch.arange(30)
    with torch.no_grad():
        theirs = library(ids[None]).logits[0]
    torch.testing.assert_close(load(tmp_path)(ids, AttentionMetadata.uncached((30,)), None), theirs)


def test_effective_settings_of_gemma4_show_native_layers_and_the_shared_cache(tmp_path: Path) -> None:
    """Three of five layers have keys and values of their own: two with heads of 16 numbers, one with heads of 32."""
    CASES["gemma4"].build().save_pretrained(tmp_path)
    write_byte_level(tmp_path, 300)
    values: dict[str, Any] = {"device": "cpu", "threads": torch.get_num_threads(), "kv_cache_memory": 2}
    _, facts = build_engine(ModelSettings(checkpoint=tmp_path, **values), read_manifest(tmp_path))
    assert facts.attention == ("native" if BUILDABLE else "sdpa")
    assert (facts.kernel_level is not None) == bool(BUILDABLE)
    value_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}[facts.kv_cache_dtype]
    num_tokens = facts.num_blocks * facts.block_size
    assert facts.kv_cache_bytes == num_tokens * 2 * (16 + 32 + 16) * value_bytes
