"""`kvasir eval`: tables, files, and one-line errors."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model, save_checkpoint
from model.checkpoint.manifest import read_manifest
from model.evaluation.prompts import PROMPTS
from model.io.files import file_digest
from model.tokenizer.byte_level import load_native
from service.cli.main import main

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "model" / "training" / "configs" / "tales.toml"
TEXTS = ["once upon a time", "the inn\n\nand the rain", "a hen " * 100]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvasir eval` on the tiny model. Returns exit code, stdout and stderr."""

    def run_eval(*argv: object, checkpoint: Path = tiny_checkpoint) -> tuple[int, str, str]:
        fixed = ("eval", "--checkpoint", str(checkpoint), "--device", "cpu", "--threads", "1")
        code = main([*fixed, *map(str, argv)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run_eval


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"sentence_good": "a hen", "sentence_bad": "hen a", "UID": "order"},
        {"sentence_good": "b", "sentence_bad": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_run_evaluates_texts_pairs_and_samples(
    run: Run, texts: Path, pairs: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    out, documents, tasks = (tmp_path / name for name in ("out.json", "documents.jsonl", "tasks"))
    code, told, said = run(
        *("--texts", f"mine={texts}", "--texts", f"again={texts}", "--pairs", pairs, "--samples", 1),
        *("--out", out, "--documents", documents, "--export-tasks", tasks),
    )
    assert code == 0, said
    for part in ("mine", "again", "order", "bits/byte", "top-1", "distinct-3", PROMPTS[0].text):
        assert part in told
    assert f"--include_path {tasks} --tasks kvasir_mine,kvasir_again,kvasir_minimal_pairs" in said
    assert "max_length=256" in said
    result = json.loads(out.read_text())
    assert result["checkpoint"]["files"]["config.json"] == file_digest(tiny_checkpoint / "config.json")
    assert result["checkpoint"]["training"] == {"steps": 0}
    assert result["settings"]["dtype"] == "float32"
    assert result["held_out"]["mine"] == result["held_out"]["again"]
    assert result["held_out"]["mine"]["documents"] == 3
    assert result["pairs"]["pairs"] == 2
    assert [measured["temperature"] for measured in result["diversity"]] == [0.5, 0.8, 1.0]
    rows = [json.loads(line) for line in documents.read_text().splitlines()]
    assert [(row["split"], row["index"]) for row in rows[:4]] == [("mine", 0), ("mine", 1), ("mine", 2), ("again", 0)]
    ours = sum(row["log_likelihood"] for row in rows[:3])
    held_out = result["held_out"]["mine"]
    assert held_out["nats_per_token"] == pytest.approx(-ours / held_out["tokens"])
    assert all(row["loglikelihood_rolling"] > row["log_likelihood"] for row in rows[:2]), "no mark at the end"
    assert rows[-1]["good"] < 0
    assert (tasks / "kvasir_minimal_pairs.yaml").is_file()


def test_held_out_documents_of_a_recipe_are_evaluated(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = []
    for most in (2, 1):
        flags = ("--config", RECIPE, "--max-documents", most, "--max-context-length", 100, "--samples", 0, "--out", out)
        code, _, said = run(*flags)
        assert code == 0, said
        told.append(json.loads(out.read_text()))
    assert [result["held_out"]["grimm"]["documents"] for result in told] == [2, 1]
    assert told[0]["settings"]["max_context_length"] == 100
    assert told[0]["samples"] == []


def test_a_hugging_face_directory_gives_the_same_results(
    run: Run, texts: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "hugging-face"
    assert main(["convert", "--export", str(tiny_checkpoint), "--out", str(foreign)]) == 0
    assert not (foreign / "manifest.json").exists()
    results = []
    for checkpoint in (tiny_checkpoint, foreign):
        out = tmp_path / "out.json"
        code, _, said = run("--texts", f"mine={texts}", "--samples", 1, "--out", out, checkpoint=checkpoint)
        assert code == 0, said
        results.append(json.loads(out.read_text()))
    for name, value in results[0]["held_out"]["mine"].items():
        assert results[1]["held_out"]["mine"][name] == pytest.approx(value, rel=1e-5)
    assert results[1]["samples"] == results[0]["samples"]
    weights = results[1]["checkpoint"]["files"]["model.safetensors"]
    assert weights == file_digest(foreign / "model.safetensors")


def test_dtype_and_context_length_change_the_results(run: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    bits = []
    for flags in ((), ("--dtype", "bfloat16"), ("--quantize", "int8"), ("--max-context-length", 9)):
        assert run("--texts", f"mine={texts}", "--samples", 0, "--out", out, *flags)[0] == 0
        bits.append(json.loads(out.read_text())["held_out"]["mine"]["bits_per_byte"])
    assert len(set(bits)) == 4


@pytest.mark.parametrize("flags", [("--quantize", "fp8"), ("--kv-cache-dtype", "float16", "--dtype", "bfloat16")])
def test_unsupported_quantization_is_rejected_before_measuring(run: Run, texts: Path, flags: tuple[str, ...]) -> None:
    code, _, said = run("--texts", f"mine={texts}", "--samples", 0, *flags)
    assert code == 2
    assert "measuring" not in said


@pytest.mark.parametrize(
    "flags", [("--quantize", "int8"), ("--kv-cache-dtype", "float16"), ("--kv-cache-dtype", "int8")]
)
def test_the_change_by_quantization_is_reported(run: Run, texts: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    out = tmp_path / "out.json"
    given = ("--texts", f"mine={texts}", "--samples", 0, "--out", out)
    _, table, _ = run(*given)
    plain = json.loads(out.read_text())
    assert "by rounding" not in table
    code, table, _ = run(*given, *flags)
    rounded = json.loads(out.read_text())
    assert code == 0
    assert rounded["without_rounding"] == plain["held_out"]
    bits, before = (result["held_out"]["mine"]["bits_per_byte"] for result in (rounded, plain))
    assert bits != before
    assert f"{bits / before - 1:+.2%}" in table


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--samples", "0"), 2, "nothing to measure: give --config, --texts, --pairs or --suite"),
        (
            ("--texts", "mine"),
            2,
            "--texts: must be NAME=FILE: a name for the results and a text file; names must differ",
        ),
        (("--texts", "mine=none.txt"), 1, "none.txt: No such file or directory; correct the path"),
        (("--pairs", "none.jsonl"), 1, "none.jsonl: No such file or directory"),
        (("--config", "none.toml"), 1, "none.toml: No such file or directory"),
        (("--out", "/none/out.json"), 2, "--out: must be a file that can be written, in an existing directory"),
        (("--documents", "."), 2, "--documents: must be a file that can be written, in an existing directory"),
        (("--max-context-length", "257"), 2, "must be from 3 to 256, the number of positions of the model"),
        (("--max-context-length", "2"), 2, "must be from 3 to 256"),
        (
            ("--config", str(RECIPE), "--texts", "grimm=x"),
            2,
            "the name grimm is already used by another text or by a source",
        ),
        (("--export-tasks", str(ROOT)), 1, "choose an empty or a new directory"),
    ],
)
def test_an_unusable_input_causes_a_one_line_error(run: Run, flags: tuple[str, ...], code: int, said: str) -> None:
    found, told, error = run(*flags)
    assert (found, told) == (code, "")
    assert said in error
    assert error.startswith("kvasir eval: ")
    assert error.count("\n") == 1


def test_names_are_not_parsed_as_markup(run: Run, texts: Path, tmp_path: Path) -> None:
    """Names of texts and of groups of minimal pairs come from files and may look like rich's markup."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"sentence_good": "a hen", "sentence_bad": "hen a", "UID": "[/order]"}))
    code, told, said = run("--texts", f"[bold]={texts}", "--pairs", path, "--samples", 0)
    assert code == 0, said
    assert "[bold]" in told
    assert "[/order]" in told


def test_a_damaged_checkpoint_causes_a_one_line_error(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    (copy / "config.json").write_text("{}")
    code, _, error = run(checkpoint=copy)
    assert code == 1
    assert error.count("\n") == 1


def test_a_sentence_longer_than_the_context_causes_an_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"sentence_good": "a hen " * 200, "sentence_bad": "b"}))
    code, _, error = run("--pairs", path, "--samples", 0)
    assert code == 1
    assert error.endswith("exceeds the model's context of 256; give a shorter text\n")


def test_nan_and_infinity_become_null_in_json(run: Run, texts: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    manifest = read_manifest(tiny_checkpoint)
    model = load_model(manifest, device="cpu", dtype=torch.float32, attention=ATTENTION_BACKENDS["eager"])
    broken = tmp_path / "broken"
    save_checkpoint(
        broken,
        config=manifest.config,
        # Finite, but the scores of the first layer's attention overflow.
        tensors={name: torch.full_like(tensor, 1e18) for name, tensor in model.state_dict().items()},
        tokenizer=load_native(tiny_checkpoint),
        name="broken",
        training={},
    )
    out, documents = tmp_path / "out.json", tmp_path / "documents.jsonl"
    flags = ("--texts", f"mine={texts}", "--samples", 0, "--out", out, "--documents", documents)
    assert run(*flags, checkpoint=broken)[0] == 0

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    assert json.loads(out.read_text(), parse_constant=refuse)["held_out"]["mine"]["bits_per_byte"] is None
    rows = [json.loads(line, parse_constant=refuse) for line in documents.read_text().splitlines()]
    assert [row["log_likelihood"] for row in rows] == [None] * len(TEXTS)
