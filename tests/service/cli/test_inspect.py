"""`kvasir inspect` and `kvasir inspect params`."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.manifest import CONFIG_FILE, read_manifest, write_manifest
from model.config import ModelConfig
from model.inspect import parameter_counts
from model.inspect.parameter_counts import count_parameters
from service.cli.main import main
from service.config.settings import ServeSettings
from service.worker.engine_factory import build_engine, forecast_engine
from service.worker.memory_plan import ServerNeeds
from tests.families.models import CASES
from tests.families.tokenizer_files import write_byte_level
from tests.tiny_model import save_tiny_checkpoint, tiny_config

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvasir inspect` with arguments. Returns exit code, stdout and stderr."""

    def run_inspect(*argv: object) -> tuple[int, str, str]:
        code = main(["inspect", *map(str, argv)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run_inspect


def test_inspect_shows_sizes_tokens_files_and_training(tiny_checkpoint: Path, run: Run) -> None:
    code, out, _ = run("--checkpoint", tiny_checkpoint)
    assert code == 0
    assert f"{tiny_config(274).num_parameters:,}" in out
    assert "L·g·(d_k + d_v)·4 = 256 bytes per token" in out
    for part in ("tiny (", "attention", "files; --verify", "served here", "training", "generation defaults"):
        assert part in out
    assert "'<|endoftext|>'" in out
    assert "None" not in out
    assert "64.0 KiB per full context" in out


def test_only_fields_that_affect_the_model_are_shown(tiny_checkpoint: Path, run: Run) -> None:
    names = {line.split()[0] for line in run("--checkpoint", tiny_checkpoint)[1].splitlines() if line.startswith("  ")}
    assert {"rope_theta", "norm_eps", "qk_norm", "norm_unit_offset"} <= names
    assert not {"norm_bias", "qk_norm_scope", "sliding_window"} & names


def test_training_sources_are_one_row_each(tmp_path: Path, run: Run) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    sources = [
        {"name": "tales", "licence": "public domain", "sha256": "ab" * 32, "attribution": ""},
        {"name": "more", "share": 0.25},
    ]
    write_manifest(
        directory,
        name="tiny",
        training={"sources": sources, "loss": {"held out": 1.23456}, "final_loss": 2.34567891, "seconds": 10160.3},
    )
    code, out, _ = run("--checkpoint", directory)
    assert code == 0
    assert "tales: licence public domain, sha256 abababababababab…" in out
    assert "more: share 0.25" in out
    assert "held out 1.235" in out
    assert "attribution" not in out, "there is none"
    assert re.search(r"final_loss +2\.346\n", out)
    assert re.search(r"seconds +10160\n", out)
    assert "{" not in out


def test_earlier_training_runs_are_one_row_each(tmp_path: Path, run: Run) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    first = {"name": "first", "steps": 30, "tokens": 2_000, "seconds": 1800.0, "suite": {"pairs": {"accuracy": 0.5}}}
    second = {"name": "second", "steps": 20, "tokens": 1_000, "seconds": 5400.0, "started_from": first}
    suite = {"pairs": {"accuracy": 0.75}, "diversity": [{"temperature": 0.5}, {"temperature": 1.0}]}
    training = {"steps": 1, "tokens": 100, "seconds": 0.0, "suite": suite, "started_from": second}
    write_manifest(directory, name="tiny", training=training)
    code, out, _ = run("--checkpoint", directory)
    assert code == 0
    assert "3, with 3,100 tokens and 2.0 hours of steps" in out
    assert "pairs (accuracy 0.75), diversity (temperature 0.5), (temperature 1)" in out
    assert re.search(r"started_from +second: steps 20, tokens 1000, seconds 5400\n", out)
    assert re.search(r"before it +first: steps 30, tokens 2000, seconds 1800\n", out)


def test_generation_defaults_are_shown(tmp_path: Path, run: Run) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    (directory / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 5, "num_beams": 4}')
    code, out, _ = run("--checkpoint", directory)
    assert code == 0
    assert "temperature 0.6, top_k 5" in out
    assert "ignored defaults     num_beams" in out
    assert "chat template        not set" in out


def test_a_chat_template_is_shown(tmp_path: Path, run: Run) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code, out, _ = run("--checkpoint", directory)
    assert code == 0
    assert "chat template        25 characters, from chat_template.jinja" in out


def test_an_unknown_inspect_subcommand_is_named(run: Run) -> None:
    """The checkpoint may be given without its flag."""
    code, out, err = run("parms")
    assert (code, out) == (1, "")
    assert err.startswith("kvasir inspect: parms: no such directory or file")


def test_no_weight_is_read_without_verify(tmp_path: Path, run: Run) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    assert run("--verify", directory)[0] == 0
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))
    code, out, err = run(directory)
    assert (code, err) == (0, "")
    assert "files; --verify compares the hashes" in out
    code, out, err = run(directory, "--verify")
    assert code == 1
    assert f"would be rejected\n    {path}: SHA-256 differs" in out
    assert err.startswith(f"kvasir inspect: a server would reject this: {path}: SHA-256 differs")


def test_all_refusals_are_listed(tmp_path: Path, run: Run) -> None:
    CASES["llama mha"].build().save_pretrained(tmp_path)
    write_byte_level(tmp_path, 300)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "vocab_size": 200, "new_key": None}))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    code, out, err = run(tmp_path)
    (ignored,), rejected = (
        [line.strip() for line in out.partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()]
        for title in ("ignored", "would be rejected")
    )
    assert ignored == f"{tmp_path / CONFIG_FILE}: new_key=None: unknown key, ignored"
    assert code == 1
    assert len(rejected) == 2
    assert "chat_template.jinja: " in rejected[0]
    assert "model.embed_tokens.weight" in rejected[1]
    assert err == f"kvasir inspect: a server would reject this: {rejected[0]}\n"
    values = json.loads(run(tmp_path, "--json")[1])
    assert values["refusals"] == rejected
    assert values["warnings"] == [ignored]
    assert values["serving"] is None
    assert values["family"] == "llama"


def test_a_family_that_is_not_served_is_named_beside_other_refusals(tmp_path: Path, run: Run) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_type": "lfm2", "layer_types": ["conv"]}))
    code, out, _ = run(tmp_path)
    assert code == 1
    assert "model_type='lfm2': needs recurrent layers" in out
    assert f"{tmp_path}: no tokenizer" in out


@pytest.mark.parametrize("quantized", [False, True])
def test_the_forecast_is_the_engine_that_is_built(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], quantized: bool
) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    if quantized:
        assert main(["convert", "--source", f"{directory}", "--quantize", "int8", "--out", f"{tmp_path}/int8"]) == 0
        directory = tmp_path / "int8"
        capsys.readouterr()
    settings = ServeSettings(checkpoint=directory, max_num_running=4)
    needs = ServerNeeds(standby=False, num_blocks=0)
    forecast = forecast_engine(settings, read_manifest(directory), server=needs)
    _, facts = build_engine(settings, read_manifest(directory), server=needs)
    assert forecast.facts == facts
    assert forecast.cache_bytes_per_token * facts.block_size * facts.num_blocks == facts.kv_cache_bytes
    values = json.loads(run(directory, "--json")[1])["serving"]
    for name in ("device", "attention", "kernel_level", "dtype", "matrices"):
        assert values[name] == getattr(facts, name)
    assert values["native_layers"] == (tiny_config(274).num_layers if facts.kernel_level else 0)
    assert values["streams"]["256"] == values["kv_cache_tokens"] // 256


def test_the_forecast_counts_the_bits_of_int4(tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    config, needs = tiny_config(274), ServerNeeds(standby=False, num_blocks=0)
    found = {}
    for quantize in ("none", "int4"):
        settings = ServeSettings(checkpoint=directory, device="cpu", dtype="float32", quantize=quantize)
        found[quantize] = forecast_engine(settings, read_manifest(directory), server=needs).weight_bytes
    a_layer = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 32 * 2 * 64 + 64 * 32  # qkv, out, gate and up, down
    int8 = 274 * 32 + a_layer  # the tied embedding and the first layer
    floats = config.num_parameters - 274 * 32 - 2 * a_layer
    assert found == {"none": 4 * config.num_parameters, "int4": 4 * floats + int8 + round(a_layer * 4.75 / 8)}


def test_generate_warns_of_ignored_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CASES["llama mha"].build().save_pretrained(tmp_path)
    write_byte_level(tmp_path, 300)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**config, "new_key": None}))
    assert main(["generate", "--checkpoint", str(tmp_path), "--prompt", "a", "--max-tokens", "1"]) == 0
    warning = f"kvasir generate: warning: {tmp_path / CONFIG_FILE}: new_key=None: unknown key, ignored\n"
    assert warning in capsys.readouterr().err


def test_params_prints_formula_and_tensor_counts(tiny_checkpoint: Path, run: Run) -> None:
    code, out, err = run("params", tiny_checkpoint)
    assert (code, err) == (0, "")
    total = f"{tiny_config(274).num_parameters:,}"
    assert f"tiny: {total} parameters, grouped-query attention" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  total"))
    assert line.split() == ["total", total, total, "100.0%", "equal"]
    assert "DIFFERS" not in out
    assert "one head                   d·(2·d_k + d_v)" in out
    assert "= 256 bytes per token, counted 256: equal" in out
    assert "50.0% of what multi-head attention with 4 heads would store" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 1}, "multi-query"),
        ({"num_kv_heads": 4}, "multi-head"),
        ({"num_heads": 1, "num_kv_heads": 1}, "single-head"),
        ({"attention": "average", "position": "none", "num_kv_heads": 4}, "average attention has no scores"),
        ({"position": "disentangled", "max_relative_distance": 8}, "W_K of distances"),
        ({"position": "alibi"}, "ALiBi: fixed slopes"),
        ({"tie_embeddings": False}, "V·d"),
    ],
)
def test_params_counts_equal_the_formulas_for_every_mechanism(
    tmp_path: Path, run: Run, change: dict[str, Any], words: str
) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    config = ModelConfig.from_dict({**tiny_config(274).to_dict(), **change})
    (directory / CONFIG_FILE).write_text(json.dumps(config.to_dict()))
    code, out, _ = run("params", "--checkpoint", directory)
    assert code == 0
    assert words in out
    assert "DIFFERS" not in out
    assert f"{config.num_parameters:,}" in out


def test_params_reports_a_formula_that_disagrees_with_the_tensors(
    tiny_checkpoint: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = count_parameters(read_manifest(tiny_checkpoint).config)
    wrong = [dataclasses.replace(row, num_counted=7) if row.name == "W_V" else row for row in rows]
    monkeypatch.setattr(parameter_counts, "count_parameters", lambda _: wrong)
    code, out, err = run("params", "--checkpoint", tiny_checkpoint)
    assert code == 1
    assert "DIFFERS" in out
    assert (
        err == "kvasir inspect params: attention W_V: formula d·g·d_v gives 1,024 parameters, but the tensors have 7\n"
    )


def test_params_reports_an_unusable_checkpoint_in_one_line(tmp_path: Path, tiny_checkpoint: Path, run: Run) -> None:
    code, _, err = run("params", "--checkpoint", tmp_path / "none")
    assert code == 1
    assert err.startswith(f"kvasir inspect params: {tmp_path / 'none'}: no such directory")
    assert err.count("\n") == 1
    assert run("params", "--checkpoint", tiny_checkpoint, "--layer", "2")[::2] == (
        2,
        "kvasir inspect params: unrecognized arguments: --layer 2; see kvasir inspect params --help\n",
    )


def test_the_largest_allowed_sizes_are_counted(tmp_path: Path, run: Run) -> None:
    """Sizes in MB are floats, which could overflow for the largest config values."""
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    values = json.loads((directory / CONFIG_FILE).read_text())
    sizes = ("vocab_size", "max_context_length", "hidden_size", "num_heads", "num_kv_heads", "mlp_size")
    values |= dict.fromkeys(sizes, 2**31 - 1) | {"head_dim": 2**31 - 2, "num_layers": 10_000}
    (directory / CONFIG_FILE).write_text(json.dumps(values))
    code, out, err = run("params", "--checkpoint", directory)
    assert (code, err) == (0, "")
    assert f"{ModelConfig.from_dict(values).num_parameters:,} parameters" in out
    code, _, err = run("--checkpoint", directory)
    assert (code, err.count("\n")) == (1, 1)
