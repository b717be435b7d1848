"""`kvasir bench` on a tiny model: every point measured, and JSON that says where it comes from."""

import json
from pathlib import Path

import pytest

from loadtest import bench_engine
from loadtest.bench_engine import Prompts


def test_a_sweep_writes_json(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "engine.json"
    arguments = ["--checkpoint", str(checkpoint), "--out", str(out), "--batch", "1", "3"]
    arguments += ["--prompt-tokens", "5", "20", "--output-tokens", "4", "--repeats", "2"]
    assert bench_engine.main([*arguments, "--", "--threads", "1", "--attention", "eager"]) == 0
    result = json.loads(out.read_text())
    assert {"commit", "machine", "versions", "command", "date", "other_work_cores", "took_seconds"} <= set(result)
    assert result["command"].startswith("kvasir bench --checkpoint")
    assert (result["kind"], result["model"]["name"]) == ("engine", "tiny")
    assert (result["model"]["threads"], result["model"]["attention"]) == (1, "eager")
    assert [(point["batch_size"], point["prompt_tokens"]) for point in result["points"]] == [
        (1, 5), (3, 5), (1, 20), (3, 20),
    ]  # fmt: skip
    figures = ("tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second", "decode_ratio", "ttft_ms")
    for point in result["points"]:
        for figure in (*figures, "bare_decode_tokens_per_second"):
            assert len(point[figure]["values"]) == 2
            assert 0 < point[figure]["min"] <= point[figure]["median"] <= point[figure]["max"]
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "100", "--output-tokens", "64"], "164 tokens, the model's context is 128"),
        (["--batch", "65"], "a batch of 65 needs -- --max-num-running 65"),
        (["--batch", "0"], "at least 1"),
        (["--output-tokens", "1"], "output at least 2"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_engine.main(["--checkpoint", str(checkpoint), "--prompt-tokens", "8", *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_engine.main(["--checkpoint", "none", "--model-name", "x"])
    assert exit_.value.code == 2
    said = "kvasir bench: unrecognized arguments: --model-name x; see kvasir bench --help\n"
    assert capsys.readouterr().err == said


def test_no_checkpoint_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main(["--checkpoint", str(tmp_path)])
    assert "neither config.json nor manifest.json" in capsys.readouterr().err


def test_no_two_prompts_share_a_block() -> None:
    prompts = Prompts(list(range(50_000)))
    beginnings = {prompts.next(16) for _ in range(2000)}
    assert len(beginnings) == 2000
    assert {len(prompt) for prompt in beginnings} == {16}
