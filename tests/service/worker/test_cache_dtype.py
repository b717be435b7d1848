"""`--kv-cache-dtype`: size of the KV-cache, reported values, and rejected models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from service.cli.main import main
from service.config.settings import ModelSettings, SettingsError, read_settings
from service.worker.engine_factory import build_engine

BYTES_PER_TOKEN = 256  # float32 keys and values of the tiny model


@pytest.fixture(autouse=True)
def _threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settings(checkpoint: Path, **values: Any) -> ModelSettings:
    return ModelSettings(checkpoint=checkpoint, **{"device": "cpu", "threads": 1, **values})


def test_a_smaller_dtype_holds_more_tokens_in_the_same_memory(tiny_checkpoint: Path) -> None:
    manifest = read_manifest(tiny_checkpoint)
    found = {}
    for wanted in ("auto", "float16", "int8"):
        engine, facts = build_engine(settings(tiny_checkpoint, kv_cache_memory=2, kv_cache_dtype=wanted), manifest)
        found[wanted] = facts
        spare = facts.kv_cache_bytes // facts.num_blocks  # the block that padding writes to
        assert engine._runner._cache.num_bytes == facts.kv_cache_bytes + spare  # type: ignore[attr-defined]
        assert facts.setting_values()["kv_cache_dtype"] == facts.kv_cache_dtype
        assert 0 <= 2 * 2**20 - facts.kv_cache_bytes < spare
        assert f"(2 MiB of {facts.kv_cache_dtype})" in str(facts)
    assert [facts.kv_cache_dtype for facts in found.values()] == ["float32", "float16", "int8"]
    assert found["auto"].num_blocks == 2 * 2**20 // (16 * BYTES_PER_TOKEN)
    assert found["float16"].num_blocks == 2 * found["auto"].num_blocks
    # Keys and values have 8 numbers: 8 bytes and a scale of 4 bytes, instead of 32 bytes.
    assert found["int8"].num_blocks == 2 * 2**20 // (16 * BYTES_PER_TOKEN * 12 // 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "paged", "eager"])
def test_int8_cache_serves_with_each_dtype_and_attention(tiny_checkpoint: Path, dtype: str, attention: str) -> None:
    asked = settings(tiny_checkpoint, kv_cache_dtype="int8", dtype=dtype, attention=attention)
    engine, facts = build_engine(asked, read_manifest(tiny_checkpoint))
    assert (facts.dtype, facts.kv_cache_dtype) == (dtype, "int8")
    engine.warm_up()
    assert not engine.has_work


def test_float16_cache_takes_half_the_memory_for_the_same_tokens(tiny_checkpoint: Path) -> None:
    manifest = read_manifest(tiny_checkpoint)
    whole, half = (
        build_engine(settings(tiny_checkpoint, max_num_running=4, kv_cache_dtype=wanted), manifest)[1]
        for wanted in ("auto", "float16")
    )
    assert whole.num_blocks == half.num_blocks
    assert whole.kv_cache_bytes == 2 * half.kv_cache_bytes


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_float16_cache_serves_with_each_matrix_format(tiny_checkpoint: Path, quantize: str) -> None:
    asked = settings(tiny_checkpoint, kv_cache_dtype="float16", quantize=quantize)
    engine, facts = build_engine(asked, read_manifest(tiny_checkpoint))
    assert (facts.dtype, facts.kv_cache_dtype) == ("float32", "float16")
    engine.warm_up()
    assert not engine.has_work


@pytest.mark.parametrize(
    ("asked", "model"),
    [
        ({"dtype": "bfloat16"}, "bfloat16 on the CPU"),
        ({"dtype": "float64"}, "float64 on the CPU"),
        ({"device": "auto"}, "bfloat16 on CUDA"),
        ({"device": "cuda", "dtype": "float32"}, "float32 on CUDA"),
    ],
)
def test_float16_cache_of_another_model_dtype_or_device_is_rejected(
    asked: dict[str, str], model: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    remedy = "omit the flag, or give --device cpu --dtype float32"
    line = f"--kv-cache-dtype float16 needs a float32 model on the CPU, and this model is {model}; {remedy}"
    with pytest.raises(SettingsError) as refusal:
        build_engine(settings(tiny_checkpoint, kv_cache_dtype="float16", **asked), read_manifest(tiny_checkpoint))
    assert str(refusal.value) == line


def test_a_rejected_cache_dtype_is_a_one_line_error(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--kv-cache-dtype", "float16", "--prompt", "a"]
    assert main(["generate", "--checkpoint", str(tiny_checkpoint), *flags]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("kvasir generate: --kv-cache-dtype float16 needs a float32 model on the CPU")


def test_an_environment_variable_sets_the_cache_dtype(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_KV_CACHE_DTYPE", "float16")
    read = read_settings(ModelSettings, ["--checkpoint", str(tiny_checkpoint)], command="serve", summary="")
    assert read.kv_cache_dtype == "float16"
    with pytest.raises(SettingsError, match=r"--kv-cache-dtype: .*'float32'"):
        read_settings(ModelSettings, ["--kv-cache-dtype", "float32", "--checkpoint", "."], command="serve", summary="")


def test_eval_measures_the_loss_of_a_rounding_cache(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "out.json"
    texts.write_text("once upon a time, the inn and the rain\n" * 5)
    results = {}
    command = ["eval", "--checkpoint", str(tiny_checkpoint), "--device", "cpu", "--threads", "1", "--samples", "0"]
    command += ["--texts", f"mine={texts}", "--out", str(out)]
    for wanted in ("auto", "float16", "int8"):
        assert main([*command, "--kv-cache-dtype", wanted]) == 0, capsys.readouterr().err
        results[wanted] = json.loads(out.read_text())
        assert results[wanted]["settings"]["kv_cache_dtype"] == wanted
    exact, half, quarter = (found["held_out"]["mine"]["nats_per_token"] for found in results.values())
    assert half == pytest.approx(exact, rel=1e-3)
    assert quarter == pytest.approx(exact, rel=5e-3)
    assert len({exact, half, quarter}) == 3
    assert main([*command, "--kv-cache-dtype", "float16", "--dtype", "bfloat16"]) != 0
    assert "--kv-cache-dtype float16 needs a float32 model" in capsys.readouterr().err
