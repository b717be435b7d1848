"""Gemma 3 with a vision tower: the language model is served, and users are informed of the part that is not."""

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
from tests.families.models import CASES, load
from tests.families.tokenizer_files import write_byte_level
from tests.model.kernel_libraries import BUILDABLE

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
