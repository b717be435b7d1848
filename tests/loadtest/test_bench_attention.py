"""Attention benchmark on two tiny recipes: training, speeds, and the page of both."""

import json
from pathlib import Path

import pytest

from loadtest.docgen import pages
from loadtest.inprocess import bench_attention
from loadtest.inprocess.bench_attention import Row
from tests.loadtest.test_attention_page import EMPTY

FABLES = Path(__file__).parents[1] / "data" / "aesop.txt"
ROWS = (Row("multi-head", "the baseline"), Row("alibi", "linear biases"))
BASE = f"""
name = "tiny"
seed = 1
vocab_size = 320
sequence_length = 32
batch_size = 4
steps = 6
warmup_steps = 1
decay_steps = 2
matrix_lr = 1e-2
adam_lr = 6e-3
weight_decay = 0.1
grad_clip = 1.0
checkpoint_minutes = 1
evaluate_every = 2
[model]
max_context_length = 160
num_layers = 1
hidden_size = 16
num_heads = 2
num_kv_heads = 2
head_dim = 8
mlp_size = 32
position = "rotary"
rope_theta = 10000.0
norm = "rms_norm"
norm_eps = 1e-5
mlp = "swiglu"
attention_bias = false
mlp_bias = false
qk_norm = false
tie_embeddings = true
[[sources]]
name = "fables"
path = "{FABLES}"
repeats = 1
held_out = 0.1
licence = "public domain"
"""


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with two recipes, used instead of the repository's recipes."""
    (tmp_path / "multi-head.toml").write_text(BASE)
    (tmp_path / "alibi.toml").write_text('extends = "multi-head.toml"\n[model]\nposition = "alibi"\n')
    monkeypatch.setattr(bench_attention, "RECIPES", tmp_path)
    monkeypatch.setattr(bench_attention, "ROWS", ROWS)
    monkeypatch.setattr(bench_attention, "KERNEL_LENGTHS", (16,))
    monkeypatch.setattr(
        bench_attention, "TRAIN_STEPS", 1
    )  # all rounds together stay within the six steps of the recipe
    return tmp_path


@pytest.mark.slow
def test_from_recipes_to_the_page(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, runs = recipes / "attention.json", recipes / "runs"
    paths = ["--runs", str(runs), "--out", str(out)]
    assert bench_attention.main(["speed", *paths]) == 1
    assert "multi-head-1 is not finished; run bench_attention train --seeds 1" in capsys.readouterr().err
    assert bench_attention.main(["train", "--seeds", "1", "2", *paths]) == 0
    logs = {path: path.read_bytes() for path in runs.glob("*/log.jsonl")}
    assert len(logs) == 4
    assert bench_attention.main(["speed", "--rounds", "2", *paths]) == 0

    results = json.loads(out.read_text())
    assert {"commit", "machine", "versions", "command", "date", "other_work_cores", "took_seconds"} <= set(
        results["train"]
    )
    alibi = results["train"]["rows"]["alibi"]
    assert alibi["changes"] == {"position": "alibi"}
    assert [run["seed"] for run in alibi["runs"]] == [1, 2]
    assert [step for step, _ in alibi["runs"][0]["curve"]] == [2, 4, 6]
    assert alibi["runs"][0]["nats_per_token"] != alibi["runs"][1]["nats_per_token"]
    speeds = results["speed"]["rows"]
    assert list(speeds) == ["multi-head", "alibi", "eager"]
    assert all(len(row[figure]["values"]) == 2 for row in speeds.values() for figure in row)
    assert speeds["multi-head"]["trained_ratio"]["values"] == [1.0, 1.0]

    page = recipes / "attention.md"
    page.write_text(EMPTY)
    assert pages.main(["attention", "--results", str(recipes), "--docs", str(recipes)]) == 0
    assert "| linear biases | `position=alibi` |" in page.read_text()

    # Finished runs are read, not trained again. A run of another recipe is rejected.
    assert bench_attention.main(["train", "--seeds", "1", "2", *paths]) == 0
    assert {path: path.read_bytes() for path in logs} == logs
    assert json.loads(out.read_text())["speed"] == results["speed"]
    (recipes / "multi-head.toml").write_text(BASE.replace("steps = 6", "steps = 8"))
    assert bench_attention.main(["train", "--seeds", "1", *paths]) == 1
    assert "was trained with another recipe" in capsys.readouterr().err
