"""The bench of drafts, on a tiny model."""

import json
from pathlib import Path

import pytest

from loadtest.inprocess import bench_speculation


def test_both_engines_give_the_same_answers(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "speculation.json"
    arguments = ["--checkpoint", str(checkpoint), "--out", str(out), "--streams", "2", "--repeats", "2"]
    monkeypatch.setattr(bench_speculation, "_PASSAGE_WORDS", 6)  # this model has a context of 128 bytes
    monkeypatch.setattr(bench_speculation, "_BEGUN_WORDS", 2)
    assert bench_speculation.main([*arguments, "--output-tokens", "20"]) == 0
    result = json.loads(out.read_text())
    found = [(level["workload"], level["answers"]) for level in result["levels"]]
    assert found == [("repetitive", 16), ("sampled", 16)]
    for level in result["levels"]:
        assert min(level["tokens_per_second"]["values"]) > 0
        assert level["answers_with_the_same_tokens"] == level["answers"]
        assert level["accepted_tokens"] <= level["draft_tokens"]
        ratios = zip(
            level["tokens_per_second_with_drafts"]["values"], level["tokens_per_second"]["values"], strict=True
        )
        assert level["ratio"]["values"] == pytest.approx([ours / theirs for ours, theirs in ratios])


def test_a_checkpoint_that_is_none_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_speculation.main(["--checkpoint", str(tmp_path)]) == 1
    assert "neither config.json nor manifest.json" in capsys.readouterr().err
