"""`kvasir generate`: a flag overrides the checkpoint's default, which overrides the flag's default."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from service.cli.main import main


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    values = {"do_sample": False, "max_new_tokens": 5, "no_repeat_ngram_size": 3}
    (copy / "generation_config.json").write_text(json.dumps(values))
    return copy


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(capsys: pytest.CaptureFixture[str], checkpoint: Path, *flags: str) -> tuple[int, str, str]:
    """Run `kvasir generate`. Returns exit code, stdout and stderr."""
    fixed = ("--prompt", "once", "--device", "cpu", "--threads", "1", "--kv-cache-memory", "1")
    code = main(["generate", "--checkpoint", str(checkpoint), *fixed, *flags])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def num_tokens(told: str) -> int:
    found = re.search(r"(\d+) completion tokens", told)
    assert found is not None, told
    return int(found[1])


def test_the_checkpoints_sampling_defaults_apply(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text, told = run(capsys, checkpoint, "--seed", "1")
    assert (code, num_tokens(told)) == (0, 5)
    warning = "kvasir generate: warning: generation_config.json: unsupported keys, ignored: no_repeat_ngram_size"
    assert told.startswith(warning)
    assert run(capsys, checkpoint, "--seed", "2")[1] == text, "greedy needs no seed"
    greedy = run(
        capsys, checkpoint, "--no-generation-config", "--max-tokens", "5", "--temperature", "0", "--top-p", "1"
    )
    assert greedy[1] == text
    assert "warning" not in greedy[2]
    assert "seed" not in told + greedy[2]
    assert ", seed 7, " in run(capsys, checkpoint, "--temperature", "1", "--seed", "7")[2]


def test_the_checkpoints_repetition_penalty_applies(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys, checkpoint, "--max-tokens", "20")[1]
    values = {"do_sample": False, "repetition_penalty": 2.0}
    (checkpoint / "generation_config.json").write_text(json.dumps(values))
    _, text, told = run(capsys, checkpoint, "--max-tokens", "20")
    assert text != plain
    assert "warning" not in told


def test_a_flag_overrides_the_checkpoints_default(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {run(capsys, checkpoint, "--temperature", "1.5", "--seed", str(seed))[1] for seed in range(3)}
    assert len(texts) == 3
    assert num_tokens(run(capsys, checkpoint, "--max-tokens", "2")[2]) == 2


def test_prompt_and_completion_stay_within_a_shorter_context(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert num_tokens(run(capsys, checkpoint, "--max-context-length", "6")[2]) <= 4
    code, _, told = run(capsys, checkpoint, "--max-context-length", "6", "--max-tokens", "9")
    assert code == 2
    assert "exceed the context length of 6" in told
    code, _, told = run(capsys, checkpoint, "--max-context-length", "257")
    assert code == 2
    assert told.endswith("--max-context-length 257 is over the 256 positions of the model; set at most 256, or auto\n")
