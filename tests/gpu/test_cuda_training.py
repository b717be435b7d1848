"""Training on a CUDA device: flash attention over packed documents, and a run that learns, stops and resumes."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionForm
from model.training.attention import DocumentAttention
from model.training.config import TrainConfig, load_train_config
from model.training.data.batches import Batch, PackedDocuments
from model.training.state import read_log
from model.training.train import RunSettings, train
from tests.model.training.test_train import dialogues

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "model" / "training" / "configs" / "tales.toml"
FABLES = ROOT / "tests" / "data" / "aesop.txt"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(7, 1, 64), (4, 2, 32), (3, 3, 16)])
@pytest.mark.parametrize("lengths", [[1024], [1, 300, 17, 1, 705], [256, 256, 512]])
def test_attention_over_packed_documents_equals_the_cpu(
    dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, size: int, lengths: list[int]
) -> None:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(len(lengths))
    shapes = [(1024, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    *inputs, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    form, attention = (
        AttentionForm(layer=0, scale=size**-0.5, window=None, bias=None),
        DocumentAttention(ATTENTION_BACKENDS["sdpa"]),
    )
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.float().to(device) if device == "cpu" else x.to(device) for x in inputs]
        leaves = [x.requires_grad_() for x in leaves]
        ids_T = torch.zeros(1024, dtype=torch.int64, device=device)
        metadata = PackedDocuments.of(Batch(ids_T, ids_T, ids_T, starts.to(device)), 1024)
        out = attention.attend(*leaves, form=form, metadata=metadata, kv_cache=None)
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(out))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.float().cpu(), expected, rtol=tolerance, atol=tolerance * 2)


def config(directory: Path) -> TrainConfig:
    recipe = load_train_config(RECIPE)
    return dataclasses.replace(
        recipe,
        sources=(dataclasses.replace(recipe.sources[0], path=FABLES), dialogues(directory)),
        mask_documents=True,
        dropout=0.1,
        steps=80,
        warmup_steps=8,
        decay_steps=30,
        chat_steps=20,
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_of_packed_documents_learns_and_resumes(tmp_path: Path, compiled: bool) -> None:
    def settings(stop_after: int | None) -> RunSettings:
        return RunSettings(
            run_directory=tmp_path / "run",
            checkpoint=tmp_path / "checkpoint",
            device="cuda",
            precision="bfloat16",
            compile=compiled,
            stop_after=stop_after,
        )

    assert not train(config(tmp_path), settings(30), lambda text: None)
    assert train(config(tmp_path), settings(None), lambda text: None)
    losses = [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl")]
    assert len(losses) == 80
    assert sum(losses[50:60]) < sum(losses[:10]) - 10
    assert (tmp_path / "checkpoint" / "chat_template.jinja").is_file()
