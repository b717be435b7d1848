"""`kvasir bench` on a tiny model: measured points, JSON with provenance, rejected arguments."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loadtest.inprocess import bench_command
from loadtest.measurement import model_shapes, roofline
from loadtest.measurement.roofline import Machine
from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.manifest import read_manifest
from model.nn import transformer
from model.nn.transformer import Transformer, initialize_parameter

TINY = {
    "vocab_size": 300,
    "max_context_length": 128,
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_size": 32,
}


@pytest.fixture(autouse=True)
def _quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_READ_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_SIDES", (64,))


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run one sweep and return its JSON."""
    out = tmp_path / "new" / "engine.json"
    split = arguments.index("--") if "--" in arguments else len(arguments)
    assert bench_command.main([*arguments[:split], "--out", str(out), *arguments[split:]]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_sweep_writes_json(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--batch", "1", "3", "--context", "40", "80", "--steps", "4", "--prompt-tokens", "5", "20")
    engine = ("--", "--threads", "1", "--attention", "eager", "--dtype", "bfloat16")
    result = run(tmp_path, "--checkpoint", str(checkpoint), *sweep, "--repeats", "2", *engine)
    assert {"commit", "machine", "versions", "command", "date", "other_work_cores", "took_seconds"} <= set(result)
    assert result["command"].startswith("kvasir bench --checkpoint")
    assert (result["kind"], result["model"]["name"]) == ("engine", "tiny")
    assert (result["model"]["threads"], result["model"]["attention"]) == (1, "eager")
    assert (result["engine_settings"]["dtype"], result["engine_settings"]["threads"]) == ("bfloat16", 1)
    cells = [(point["batch_size"], point["context_length"]) for point in result["decode"]]
    assert cells == [(1, 40), (3, 40), (1, 80), (3, 80)]
    assert [point["prompt_tokens"] for point in result["prompts"]] == [5, 20]
    for point in (*result["decode"], *result["prompts"]):
        assert min(point["bytes"], point["flops"]) > 0
        figures = [figure for figure in point.values() if isinstance(figure, dict)]
        assert len(figures) == 3
        for figure in figures:
            assert len(figure["values"]) == 2
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]
    assert len(result["roofline"]["gflops"]["values"]) == 2
    shown = capsys.readouterr().out
    assert "share of the roofline" in shown
    assert "TTFT ms" in shown


def test_figures_agree_with_each_other(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline.Roofline, "probe", lambda self: Machine(1e9, 1e12))
    sweep = ("--batch", "2", "--context", "64", "--steps", "4", "--prompt-tokens", "8", "--repeats", "1")
    result = run(tmp_path, "--checkpoint", str(checkpoint), *sweep, "--", "--threads", "1")
    (decode,), (prompt,) = result["decode"], result["prompts"]
    seconds = decode["step_ms"]["median"] / 1e3
    assert decode["tokens_per_second"]["median"] == pytest.approx(2 / seconds)
    assert decode["of_the_roofline"]["median"] == pytest.approx(decode["bytes"] / 1e9 / seconds)
    assert prompt["tokens_per_second"]["median"] == pytest.approx(8 / (prompt["ttft_ms"]["median"] / 1e3))


def test_a_shape_is_measured_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_shapes.SHAPE_SIZES, "S", TINY)
    result = run(tmp_path, "--shape", "S", "--quick", "--repeats", "1", "--", "--threads", "1")
    assert result["model"]["name"] == "shape-S"
    # Default lengths that exceed the 128 positions are left out, here the prompt of 256 tokens.
    cells = [(point["batch_size"], point["context_length"]) for point in result["decode"]]
    assert [batch for batch, _ in cells] == [1, 16]
    assert all(100 < context < 128 for _, context in cells)
    assert result["prompts"] == []


def test_a_random_checkpoint_is_complete_and_its_tokens_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model_shapes.SHAPE_SIZES, "S", TINY)
    manifest = read_manifest(model_shapes.write_random_checkpoint(tmp_path, "S"))
    tokenizer = manifest.verify()
    assert tokenizer.vocab_size == TINY["vocab_size"] == manifest.config.vocab_size
    assert tokenizer.encode("  ") == [256]  # the first pair of printable characters
    assert model_shapes.shape_config("S").num_parameters == sum(
        (300 * 16, 16 * (2 + 1 + 1) * 8, 2 * 8 * 16, 3 * 16 * 32, 3 * 16)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "129"], "--context 129 leaves no prompt tokens, or exceeds the model's context of 128"),
        (["--context", "8", "--steps", "20"], "--steps 20 at --context 8 leaves no prompt tokens"),
        (["--steps", "128"], "does not fit the model's context of 128 tokens; choose other --context or --steps"),
        (["--prompt-tokens", "128"], "--prompt-tokens 128 must be below the model's context, 128 tokens"),
        (["--batch", "65"], "--batch 65 exceeds --max-num-running; add -- --max-num-running 65"),
        (["--batch", "0"], "--batch: each number must be at least 1"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--repeats", "0"], "--repeats: each number must be at least 1"),
        (["--", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_unmeasurable_arguments_are_rejected(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_command.main(["--checkpoint", str(checkpoint), *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_the_shipped_checkpoint_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVASIR_CHECKPOINT", raising=False)
    sweep = ("--batch", "1", "--context", "40", "--steps", "4", "--prompt-tokens", "5", "--repeats", "1")
    assert run(tmp_path, *sweep)["model"]["name"] == "kvasir-20m"
    assert "kvasir bench: no --checkpoint given; using the shipped model, " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--shape", "S", "--checkpoint", "x"], ["--shape", "XL"]])
def test_shape_and_checkpoint_exclude_each_other_and_a_shape_must_be_known(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_command.main(arguments)
    assert exit_.value.code == 2
    assert "--shape" in capsys.readouterr().err


def test_an_unknown_flag_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bench_command.main(["--checkpoint", "none", "--model-name", "x"])
    assert exit_.value.code == 2
    message = "kvasir bench: unrecognized arguments: --model-name x; see kvasir bench --help\n"
    assert capsys.readouterr().err == message


def test_a_directory_without_checkpoint_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_command.main(["--checkpoint", str(tmp_path)])
    assert "neither config.json nor manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "num_parameters", "kv_bytes"),
    [
        ("smollm2-135m", 134_515_008, 23_040),
        ("qwen3-0.6b", 596_049_920, 114_688),
        ("llama-3.2-1b", 1_235_814_400, 32_768),
        ("qwen3-moe", 712_807_424, 16_384),
        ("qwen3-1.7b", 1_720_574_976, 114_688),
    ],
)
def test_a_published_models_shape_has_its_parameters(shape: str, num_parameters: int, kv_bytes: int) -> None:
    config = model_shapes.shape_config(shape)
    assert config.num_parameters == num_parameters  # tied embeddings counted once
    assert config.kv_bytes_per_token(2) == kv_bytes
    assert config.qk_norm == shape.startswith("qwen3")
    assert config.max_context_length > 4096 + 64


def test_gemmas_sizes_have_the_architecture_of_qwen3() -> None:
    config = model_shapes.shape_config("gemma-3-270m")
    assert (config.vocab_size, config.head_dim, config.num_kv_heads, config.qk_norm) == (262_144, 256, 1, True)
    assert model_shapes.shape_tokenizer(config.vocab_size).vocab_size == config.vocab_size


def test_random_weights_are_those_of_an_initialized_model_and_are_written_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model_shapes.SHAPE_SIZES, "qwen3-0.6b", TINY)
    made: list[weakref.ref[torch.Tensor]] = []

    def initialize(name: str, parameter: torch.Tensor, *arguments: Any) -> torch.Tensor:
        assert all(reference() is None for reference in made)  # the float32 tensors before this one are freed
        made.append(weakref.ref(parameter))
        return initialize_parameter(name, parameter, *arguments)

    monkeypatch.setattr(transformer, "initialize_parameter", initialize)
    directory = model_shapes.write_random_checkpoint(tmp_path, "qwen3-0.6b", dtype="bfloat16")
    monkeypatch.undo()
    manifest = read_manifest(directory)
    model = Transformer(manifest.config, ATTENTION_BACKENDS["sdpa"])
    model.initialize(0)
    stored = load_file(directory / "model.safetensors")
    assert len(made) == len(stored) == len(manifest.config.parameter_shapes())
    for name, parameter in model.named_parameters():
        assert torch.equal(stored[name], parameter.to(torch.bfloat16)), name


def test_the_large_gpu_shape_has_the_sizes_of_qwen2() -> None:
    shape = model_shapes.shape_config("qwen2-1.5b")
    assert shape.num_parameters == 1_543_714_304  # those of the published checkpoint of 1.5B
    assert shape.kv_bytes_per_token(2) == 28_672
