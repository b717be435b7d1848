"""Installation of llama.cpp from source by loadtest/peers/install.sh, with stubs of Python, cmake and ninja."""

import importlib.metadata
import sys
import tarfile
from pathlib import Path

import pytest

from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.peers.engines import PeerFiles, install

SOURCE = "llama_cpp_python-1.0"
# Interpreter that logs its arguments, and creates the files that pip and the build would create.
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>{log}
last=${{@: -1}}
case "$*" in
    *"-m venv"*) mkdir -p "$last/bin"; for name in python cmake ninja; do cp "$0" "$last/bin/$name"; done ;;
    *"pip download"*) cp {archive} {home}/source/ ;;
    *"-C "*) mkdir -p {home}/build/bin; touch {home}/build/bin/llama-{{server,batched-bench,quantize}}; exit {build} ;;
    *importlib*) echo 1.0 ;;
esac
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the environment's directory, with the stub as Kvasir's interpreter and a source archive."""
    inside = tmp_path / SOURCE / "vendor" / "llama.cpp" / "CMakeLists.txt"
    inside.parent.mkdir(parents=True)
    inside.write_text("project(llama)")
    with tarfile.open(tmp_path / f"{SOURCE}.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / SOURCE, SOURCE)
    write_stub(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "stub"))
    return tmp_path / "llama_cpp"


def write_stub(directory: Path, build: int = 0) -> None:
    """Write the stub. Its ninja exits with the code `build`."""
    archive = directory / f"{SOURCE}.tar.gz"
    text = STUB.format(log=directory / "log", archive=archive, home=directory / "llama_cpp", build=build)
    (directory / "stub").write_text(text)
    (directory / "stub").chmod(0o755)


def steps(directory: Path) -> list[str]:
    """Return the commands since the last call."""
    lines = (directory / "log").read_text().splitlines()
    (directory / "log").unlink()
    return [line for line in lines if "import importlib" not in line]


def test_the_source_is_downloaded_and_built_once(tmp_path: Path, home: Path) -> None:
    install(PeerFiles(tmp_path), "llama_cpp")
    done = steps(tmp_path)
    assert [line.split()[0] for line in done] == ["stub", "python", "python", "python", "cmake", "ninja"]
    assert (home / "source" / "vendor" / "llama.cpp" / "CMakeLists.txt").read_text() == "project(llama)"
    assert Path(PeerFiles(tmp_path).program("llama_cpp", "llama-server")).is_file()
    install(PeerFiles(tmp_path), "llama_cpp")
    assert steps(tmp_path) == []


def test_a_failed_build_starts_again(tmp_path: Path, home: Path) -> None:
    write_stub(tmp_path, build=3)
    with pytest.raises(MeasurementFailed, match="failed with exit code 3"):
        install(PeerFiles(tmp_path), "llama_cpp")
    steps(tmp_path)
    write_stub(tmp_path)
    (home / "bin" / "ninja").write_text((tmp_path / "stub").read_text())
    install(PeerFiles(tmp_path), "llama_cpp")
    assert [line.split()[0] for line in steps(tmp_path)] == ["python", "cmake", "ninja"]
    assert Path(PeerFiles(tmp_path).program("llama_cpp", "llama-server")).is_file()


def test_without_a_compiler_nothing_is_downloaded(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "realpath", "sha256sum", "cat", "mkdir", "cp", "basename"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(MeasurementFailed, match=r"no C\+\+ compiler to build llama.cpp; install one"):
        install(PeerFiles(tmp_path), "llama_cpp")
    assert not any("pip download" in line for line in steps(tmp_path))


def test_kvasirs_build_of_torch_is_pinned(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = (tmp_path / "stub").read_text().replace("echo 1.0", f"echo {importlib.metadata.version('torch')}")
    (tmp_path / "stub").write_text(stub)
    install(PeerFiles(tmp_path), "openvino")
    assert (tmp_path / "openvino" / "constraints.txt").read_text() == f"torch=={importlib.metadata.version('torch')}\n"
    assert not any("ninja" in line for line in steps(tmp_path))


def test_ik_llama_cpp_must_be_built_by_hand(tmp_path: Path, home: Path) -> None:
    with pytest.raises(MeasurementFailed, match=r"build llama-batched-bench of https://github\.com/ikawrakow/ik_llama"):
        install(PeerFiles(tmp_path), "ik_llama_cpp")
    program = Path(PeerFiles(tmp_path).program("ik_llama_cpp", "llama-batched-bench"))
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    install(PeerFiles(tmp_path), "ik_llama_cpp")
    assert (home / "bin" / "llama-server").is_file(), "llama.cpp writes the model files"
