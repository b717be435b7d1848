"""Installation of llama.cpp from source, with recorded commands in place of their work."""

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.peers import engines
from loadtest.peers.engines import LLAMA_PROGRAMS, PeerFiles, install

SOURCE = "llama_cpp_python-1.0"


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record commands in place of running them, and create the files that they would create."""
    recorded: list[list[str]] = []
    home = tmp_path / "llama_cpp"

    def run(command: Sequence[str]) -> None:
        recorded.append(list(command))
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

    monkeypatch.setattr(engines, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return recorded


def test_the_source_is_downloaded_and_built_once(tmp_path: Path, steps: list[list[str]]) -> None:
    files = PeerFiles(tmp_path)
    install(files, "llama_cpp")
    configure, build = steps[-2:]
    source = Path(configure[configure.index("-S") + 1])
    assert (source / "CMakeLists.txt").read_text() == "project(llama)"
    assert build[-len(LLAMA_PROGRAMS) :] == list(LLAMA_PROGRAMS)
    assert {Path(files.program(name)).read_text() for name in LLAMA_PROGRAMS} == {"program"}
    steps.clear()
    install(files, "llama_cpp")
    assert steps == []


def test_an_interrupted_extraction_starts_again(
    tmp_path: Path, steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(archive: tarfile.TarFile, path: Path, **given: object) -> None:
        (path / SOURCE / "vendor" / "llama.cpp").mkdir(parents=True)
        raise MeasurementFailed("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extractall", cut_off)
        with pytest.raises(MeasurementFailed, match="cut off"):
            install(PeerFiles(tmp_path), "llama_cpp")
    assert not any(command[0].endswith("cmake") for command in steps)
    install(PeerFiles(tmp_path), "llama_cpp")
    configure = steps[-2]
    assert (Path(configure[configure.index("-S") + 1]) / "CMakeLists.txt").is_file()
    assert sum("download" in command for command in steps) == 1


def test_without_a_compiler_nothing_is_downloaded(
    tmp_path: Path, steps: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MeasurementFailed, match=r"no C\+\+ compiler"):
        install(PeerFiles(tmp_path), "llama_cpp")
    assert not any("download" in command for command in steps)
