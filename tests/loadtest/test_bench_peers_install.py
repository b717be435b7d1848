"""The build of a peer from source, with steps that only say what they would do."""

import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.peers import installation
from loadtest.peers.installation import LLAMA_PROGRAMS, PeerUnavailable, Place, install

SOURCE = "llama_cpp_python-1.0"


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands instead of their work; the last one of them makes the programs."""
    told: list[list[str]] = []
    home = tmp_path / "llama_cpp"

    def run(command: Sequence[str]) -> None:
        told.append(list(command))
        if "venv" in command:
            home.mkdir()
        if "download" in command:
            inside = tmp_path / SOURCE / "vendor" / "llama.cpp" / "CMakeLists.txt"
            inside.parent.mkdir(parents=True)
            inside.write_text("project(llama)")
            with tarfile.open(home / f"{SOURCE}.tar.gz", "w:gz") as archive:
                archive.add(tmp_path / SOURCE, SOURCE)
        if command[0].endswith("ninja"):
            (home / "build" / "bin").mkdir(parents=True)
            for name in LLAMA_PROGRAMS:
                (home / "build" / "bin" / name).write_text("program")

    monkeypatch.setattr(installation, "run", run)
    monkeypatch.setattr(installation.shutil, "which", lambda name: f"/usr/bin/{name}")
    return told


def test_a_source_is_fetched_unpacked_built_once(tmp_path: Path, steps: list[list[str]]) -> None:
    place = Place(tmp_path)
    install(place, "llama_cpp")
    configure, build = steps[-2:]
    source = Path(configure[configure.index("-S") + 1])
    assert (source / "CMakeLists.txt").read_text() == "project(llama)"
    assert build[-len(LLAMA_PROGRAMS) :] == list(LLAMA_PROGRAMS)
    assert {Path(place.program(name)).read_text() for name in LLAMA_PROGRAMS} == {"program"}
    steps.clear()
    install(place, "llama_cpp")
    assert steps == []


def test_unpacking_that_was_cut_off_is_begun_again(
    tmp_path: Path, steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(archive: tarfile.TarFile, path: Path, **given: object) -> None:
        (path / SOURCE / "vendor" / "llama.cpp").mkdir(parents=True)
        raise PeerUnavailable("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extractall", cut_off)
        with pytest.raises(PeerUnavailable, match="cut off"):
            install(Place(tmp_path), "llama_cpp")
    assert not any(command[0].endswith("cmake") for command in steps)
    install(Place(tmp_path), "llama_cpp")
    configure = steps[-2]
    assert (Path(configure[configure.index("-S") + 1]) / "CMakeLists.txt").is_file()
    assert sum("download" in command for command in steps) == 1


def test_without_a_compiler_it_is_not_there(
    tmp_path: Path, steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    with pytest.raises(PeerUnavailable, match=r"no C\+\+ compiler"):
        install(Place(tmp_path), "llama_cpp")
    assert not any("download" in command for command in steps)
