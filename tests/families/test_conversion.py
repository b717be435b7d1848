"""Export to Hugging Face's format, and conversion of pickles to safetensors, keep every tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.attention.metadata import AttentionMetadata
from model.checkpoint.conversion.export_hugging_face import export_checkpoint
from model.checkpoint.conversion.import_nanogpt import convert_nanogpt
from model.checkpoint.conversion.import_pickles import convert_pickles
from model.checkpoint.manifest import read_manifest
from model.huggingface.directory import INDEX_FILE, SINGLE_FILE
from model.io.files import CheckpointError
from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from tests.families.models import CASES, load, read_by_library, transformers
from tests.families.nanogpt import ARGUMENTS, random_state, write_checkpoint
from tests.families.test_nanogpt import Evil, meta
from tests.families.tokenizer_files import write_byte_level

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "kvasir-20m"
STORY = "Once upon a time, there was a little dog named Max. He loved to run in the park with his friend Lily."
PICKLE = "pytorch_model.bin"


def test_transformers_computes_the_same_logits_for_an_export(tmp_path: Path) -> None:
    """The transformers library gives the same token ids and logits for the export of the shipped checkpoint."""
    manifest = export_checkpoint(SHIPPED, tmp_path / "exported")
    assert manifest.config == read_manifest(SHIPPED).config
    ids = load_tokenizer(SHIPPED).encode(STORY)
    library_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
    assert library_tokenizer.encode(STORY, add_special_tokens=False) == ids
    with torch.no_grad():
        theirs = read_by_library(tmp_path / "exported")(torch.tensor([ids])).logits[0]
    for directory in (SHIPPED, tmp_path / "exported"):
        ours = load(directory)(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)
        assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_an_exported_checkpoint_reads_back_as_the_same_model(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.checkpoint.weights.MAX_SHARD_BYTES", 30_000)
    CASES[case].build().bfloat16().save_pretrained(tmp_path / "first")
    write_byte_level(tmp_path / "first", 300)
    second = export_checkpoint(tmp_path / "first", tmp_path / "second")
    assert second.config == read_manifest(tmp_path / "first").config
    assert len(second.weight_files) > 1
    written = {name: tensor for path in second.weight_files for name, tensor in load_file(path).items()}
    original = {  # the export is of the language model alone
        name.replace("language_model.", "", 1): tensor
        for name, tensor in load_file(tmp_path / "first" / SINGLE_FILE).items()
        if not name.startswith(("vision_tower.", "multi_modal_projector."))
    }
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in original.items())


def test_exporting_a_model_of_no_family_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ARGUMENTS | {"bias": False}
    path = write_checkpoint(tmp_path / "ckpt.pt", arguments, random_state(arguments))
    convert_nanogpt(path, meta(tmp_path / "meta.pkl"), tmp_path / "ours")
    assert main(["convert", "--export", str(tmp_path / "ours"), "--out", str(tmp_path / "theirs")]) == 1
    assert capsys.readouterr().err.startswith("kvasir convert: no model family (gpt2, llama, mistral")
    assert not (tmp_path / "theirs").exists()


def write_pickles(directory: Path, case: str, *, num_shards: int = 1) -> dict[str, torch.Tensor]:
    """Write weights as pickles, as transformers did before safetensors; return them. A tied head shares memory."""
    model = CASES[case].build()
    model.config.save_pretrained(directory)
    write_byte_level(directory, 300)
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    if num_shards == 1:
        torch.save(state, directory / PICKLE)
        return state
    names = [f"pytorch_model-{n:05}-of-{num_shards:05}.bin" for n in range(1, num_shards + 1)]
    for number, name in enumerate(names):
        torch.save(dict(list(state.items())[number::num_shards]), directory / name)
    weight_map = {name: names[number % num_shards] for number, name in enumerate(state)}
    (directory / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("case", ["gpt2", "llama mha"])
def test_pickles_convert_to_equal_safetensors(
    tmp_path: Path, case: str, num_shards: int, capsys: pytest.CaptureFixture[str]
) -> None:
    state = write_pickles(tmp_path / "old", case, num_shards=num_shards)
    assert main(["convert", "--pickle", str(tmp_path / "old"), "--out", str(tmp_path / "new")]) == 0
    assert f"{read_manifest(tmp_path / 'new').config.num_parameters:,} parameters" in capsys.readouterr().out
    files = read_manifest(tmp_path / "new").weight_files
    assert len(files) == num_shards
    written = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())
    assert (tmp_path / "new" / INDEX_FILE).exists() == (num_shards > 1)
    assert not list((tmp_path / "new").glob("*.bin*"))


def _rewrite_index(directory: Path, name: str) -> None:
    (directory / PICKLE).unlink()
    (directory / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": {"x": name}}))


def _fill(directory: Path) -> None:
    directory.mkdir()
    (directory / "x").write_text("")


TROUBLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda d: torch.save({"x": Evil(d / "it-ran")}, d / "old" / PICKLE), "reading it would run code"),
    "cut": (lambda d: (d / "old" / PICKLE).write_bytes(b"PK123"), "bin: not a complete file written by torch.save"),
    "nothing": (lambda d: (d / "old" / PICKLE).unlink(), f"neither {PICKLE} nor {PICKLE}.index.json"),
    "path trick": (lambda d: _rewrite_index(d / "old", "../x.bin"), "'../x.bin' is not a plain file name"),
    "shard missing": (lambda d: _rewrite_index(d / "old", "x.bin"), "x.bin: no such file"),
    "not a directory": (lambda d: shutil.rmtree(d / "old"), f"neither {PICKLE} nor"),
    "taken": (lambda d: _fill(d / "new"), "new: holds files; choose an empty"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_an_unusable_pickle_gives_one_error_line(tmp_path: Path, name: str) -> None:
    damage, message = TROUBLES[name]
    write_pickles(tmp_path / "old", "llama mha")
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_pickles(tmp_path / "old", tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "it-ran").exists()
