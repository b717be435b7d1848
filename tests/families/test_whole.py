"""`kvasir convert` writes a whole directory or nothing, and never changes existing files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError, written_whole
from service.cli.main import main
from tests.families.nanogpt import ARGUMENTS, random_state, write_checkpoint
from tests.families.test_conversion import PICKLE, SHIPPED, write_pickles
from tests.families.test_nanogpt import meta


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def nanogpt(directory: Path) -> list[str]:
    path = write_checkpoint(directory / "ckpt.pt", ARGUMENTS, random_state(ARGUMENTS))
    return ["--nanogpt", str(path), "--tokenizer", str(meta(directory / "meta.pkl"))]


def pickles(directory: Path) -> list[str]:
    write_pickles(directory / "old", "llama mha")
    return ["--pickle", str(directory / "old")]


def export(directory: Path) -> list[str]:
    return ["--export", str(SHIPPED)]


SOURCES = [nanogpt, pickles, export]
Source = Callable[[Path], list[str]]


@pytest.mark.parametrize("source", SOURCES)
def test_a_checkpoint_is_never_overwritten(tmp_path: Path, source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    flags = source(tmp_path)
    out = tmp_path / "mine"
    assert main(["convert", *flags, "--out", str(out)]) == 0
    before = contents(tmp_path)
    assert main(["convert", *flags, "--out", str(out)]) == 1
    assert f"{out}: holds files; choose an empty or a new directory\n" in capsys.readouterr().err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("exists", [False, True])
def test_a_conversion_that_fails_late_leaves_no_files(
    tmp_path: Path, source: Source, exists: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of the final check names the requested directory, not the temporary one."""
    flags = source(tmp_path)
    out = tmp_path / "new"
    if exists:
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))

    def refuse(manifest: object) -> None:
        raise CheckpointError(f"{manifest.directory}: is damaged")  # type: ignore[attr-defined]

    monkeypatch.setattr("model.checkpoint.manifest.Manifest.verify", refuse)
    assert main(["convert", *flags, "--out", str(out)]) == 1
    assert sorted(tmp_path.rglob("*")) == before
    where = SHIPPED if source is export else out  # an export begins by verifying its source
    assert capsys.readouterr().err == f"kvasir convert: {where}: is damaged\n"


def test_converting_a_pickle_of_no_family_leaves_no_files(tmp_path: Path) -> None:
    flags = pickles(tmp_path)
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    assert main(["convert", *flags, "--out", str(tmp_path / "new")]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / PICKLE).is_file()


def test_an_empty_directory_is_filled_and_a_new_one_is_made(tmp_path: Path) -> None:
    flags = nanogpt(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    inode = (tmp_path / "empty").stat().st_ino
    assert main(["convert", *flags, "--out", str(tmp_path / "link")]) == 0
    assert main(["convert", *flags, "--out", str(tmp_path / "deep" / "new")]) == 0
    assert (tmp_path / "empty").stat().st_ino == inode, "an existing directory may be a mount point"
    filled, made = contents(tmp_path / "empty"), contents(tmp_path / "deep" / "new")
    assert filled.keys() == made.keys()
    assert (read_manifest(tmp_path / "link").name, read_manifest(tmp_path / "deep" / "new").name) == ("link", "new")
    assert not list(tmp_path.rglob("*.partial"))


def half_write(out: Path, trouble: BaseException) -> None:
    with written_whole(out) as new:
        (new / "half").write_text("x")
        raise trouble


@pytest.mark.parametrize("trouble", [OSError(28, "No space left on device"), SafetensorError("I/O error: disk full")])
def test_a_full_disk_gives_one_error_line(tmp_path: Path, trouble: Exception) -> None:
    with pytest.raises(CheckpointError, match=r"new: .*; nothing was written$"):
        half_write(tmp_path / "new", trouble)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        half_write(tmp_path / "new", KeyboardInterrupt())
    assert list(tmp_path.iterdir()) == []


def test_a_file_instead_of_a_checkpoint_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out, message in ((tmp_path / "file", "file: is a file"), (tmp_path / "file" / "new", "new: .*Not a directory")):
        with pytest.raises(CheckpointError, match=message), written_whole(out):
            pass
    assert contents(tmp_path) == {"file": b"x"}
