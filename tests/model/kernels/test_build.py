"""Kernel libraries are compiled once and installed atomically; an error is one line."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from model.kernels import build as build_module
from model.kernels import kernel_library as loading_module
from model.kernels.build import (
    LEVELS,
    BuildError,
    CpuLevel,
    build,
    find_built,
    levels_here,
    library_name,
    runnable_levels,
)
from model.kernels.kernel_library import load_kernels

ROOT = Path(__file__).parents[3]
LEVEL = LEVELS[-1]
COMPILES = """#!/bin/sh
case " $* " in *" -c "*) ;; *) echo one >> {log};; esac
for argument; do made=$argument; done
echo "a library" > "$made"
"""


@pytest.fixture(autouse=True)
def _nothing_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading_module, "SHIPPED", tmp_path / "nothing")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake compiler; return its log file, which gets a line for each library that it links."""
    log = tmp_path / "log"
    use_compiler(COMPILES.format(log=log), tmp_path, monkeypatch)
    return log


def use_compiler(script: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = directory / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setattr(build_module, "_COMPILERS", (str(compiler),))


def use_sources(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the kernels' sources by one file that a test may change."""
    source = directory / "sources" / "one.cpp"
    source.parent.mkdir()
    source.write_text("// one")
    monkeypatch.setattr(build_module, "SOURCES", source.parent)
    return source


@pytest.mark.parametrize(
    ("variable", "directory"),
    [
        ("/var/cache/me", "/var/cache/me/kvasir"),
        ("", "~/.cache/kvasir"),
        ("relative/path", "~/.cache/kvasir"),
        ("~/cache", "~/.cache/kvasir"),
        (None, "~/.cache/kvasir"),
    ],
)
def test_the_default_cache_directory_follows_the_xdg_specification(variable: str | None, directory: str) -> None:
    """Read the default of --cache-dir in a new process. The XDG specification says that relative paths are ignored."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    if variable is not None:
        environment["XDG_CACHE_HOME"] = variable
    code = "from service.config.settings import ServeSettings; print(ServeSettings.model_fields['cache_dir'].default)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{directory}\n"


def test_a_built_library_is_found_again(compilations: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    assert find_built(LEVEL, (cache,)) is None
    built = build(LEVEL, cache)
    assert find_built(LEVEL, (tmp_path, cache)) == built
    assert built.read_bytes() == b"a library\n"
    assert [path.name for path in cache.iterdir()] == [library_name(LEVEL)], "nothing else is left"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_library_name_depends_on_sources_flags_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = use_sources(tmp_path, monkeypatch)
    names = {library_name(LEVEL), library_name(LEVELS[0])}
    source.write_text("// two")
    names.add(library_name(LEVEL))
    names.add(library_name(CpuLevel("other", frozenset(), ("-g",))))
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    names.add(library_name(LEVEL))
    assert len(names) == 5


def test_a_damaged_library_is_compiled_again(compilations: Path, tmp_path: Path) -> None:
    path = tmp_path / library_name(levels_here()[0])
    path.touch(mode=0o755)
    assert find_built(levels_here()[0], (tmp_path,)) == path
    trouble_of(tmp_path)  # the fake compiler makes no library either
    assert path.read_bytes() == b"a library\n"


def test_a_library_that_other_users_can_write_is_not_loaded(compilations: Path, tmp_path: Path) -> None:
    built = build(LEVEL, tmp_path)
    built.chmod(0o777)
    assert find_built(LEVEL, (tmp_path,)) is None


def test_an_error_reports_that_no_compiler_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_COMPILERS", ("no-such-compiler",))
    assert trouble_of(tmp_path) == "the native kernels need a C++ compiler; install one of no-such-compiler"


def test_an_error_quotes_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler("#!/bin/sh\necho hello >&2\necho 'one.cpp:1: error: no' >&2\nexit 3\n", tmp_path, monkeypatch)
    reason = f"{tmp_path}/compiler exited with status 3: one.cpp:1: error: no"
    assert trouble_of(tmp_path) == f"cannot compile the native kernels: {reason}"


def test_an_error_reports_a_cache_directory_that_cannot_be_written(compilations: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trouble = trouble_of(tmp_path / "file" / "cache")
    assert (
        trouble
        == f"cannot write the native kernels to {tmp_path}/file/cache: Not a directory; choose another directory"
    )


def trouble_of(cache: Path) -> str:
    """Return the reason why no library can be loaded."""
    with pytest.raises(BuildError) as failure:
        load_kernels(cache)
    return str(failure.value)


def test_an_error_reports_a_file_that_is_not_a_kernel_library(compilations: Path, tmp_path: Path) -> None:
    assert f"cannot load the kernel library {tmp_path / library_name(levels_here()[0])}" in trouble_of(tmp_path)


def test_levels_are_chosen_by_the_features_in_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(build_module, "CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [level.name for level in levels_here()] == [], "a system that does not say"
    cpuinfo.write_text("processor : 0\nflags\t\t: sse2 avx2 fma f16c\n\nprocessor : 1\n")
    assert [level.name for level in levels_here()] == ["avx2"]
    cpuinfo.write_text("flags\t\t: avx2 fma f16c avx_vnni\n")
    assert [level.name for level in levels_here()] == ["avx2vnni", "avx2"], "Alder Lake"
    cpuinfo.write_text("flags\t\t: avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni\n")
    assert [level.name for level in levels_here()] == ["avx512vnni", "avx512", "avx2"], "Ice Lake"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [level.name for level in levels_here()] == []


@pytest.mark.parametrize(
    ("vendor", "best"), [("AuthenticAMD", "avx512bf16"), ("GenuineIntel", "avx512bf16fma"), ("", "avx512bf16fma")]
)
def test_a_level_for_one_cpu_vendor_is_chosen_only_on_cpus_of_that_vendor(
    vendor: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_bytes(b"model name\t: \xff\nflags_of_old\t: none\n")
    with cpuinfo.open("a") as file:
        file.write(f"vendor_id\t: {vendor}\nflags\t\t: {' '.join(sorted(LEVELS[0].needs))}\n")
    monkeypatch.setattr(build_module, "CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert levels_here()[0].name == best
    assert runnable_levels()[0].name == "avx512bf16"


def test_compilers_run_with_low_priority_and_keep_temporary_files_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '#!/bin/sh\nfor made; do :; done\nprintf "%s %s" "$(nice)" "$TMPDIR" > "$made"\n'
    use_compiler(script, tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    niceness, temporary = build(LEVEL, cache).read_text().split(" ", 1)
    assert int(niceness) == min(psutil.Process().nice() + 10, 19)
    assert Path(temporary).parent == cache
    assert not Path(temporary).exists()
