"""Kernels are compiled once and installed atomically; without them, the log has one line."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from model.kernels import build as build_module
from model.kernels import kernel_library as loading_module
from model.kernels.build import BuildError, build, find_built, library_name
from model.kernels.cpu_features import LEVELS, Level, levels_here, runnable_levels
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
    """Return a log file with a line for each library that the fake compiler links."""
    log = tmp_path / "log"
    use_compiler(COMPILES.format(log=log), tmp_path, monkeypatch)
    return log


def use_compiler(script: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = directory / "compiler"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setattr(build_module, "_COMPILERS", (str(compiler),))


def use_sources(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a modifiable kernel source."""
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
def test_the_cache_is_where_xdg_puts_it(variable: str | None, directory: str) -> None:
    """The --cache-dir default in a fresh process. The XDG specification requires that relative paths are ignored."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    if variable is not None:
        environment["XDG_CACHE_HOME"] = variable
    code = "from service.config.settings import ServeSettings; print(ServeSettings.model_fields['cache_dir'].default)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{directory}\n"


def test_what_is_built_is_found_again(compilations: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "cache"
    assert find_built(LEVEL, (cache,)) is None
    built = build(LEVEL, cache)
    assert find_built(LEVEL, (tmp_path, cache)) == built
    assert built.read_bytes().startswith(b"a library\n")
    assert [path.name for path in cache.iterdir()] == [library_name(LEVEL)], "nothing else is left"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_other_sources_or_flags_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = use_sources(tmp_path, monkeypatch)
    names = {library_name(LEVEL), library_name(LEVELS[0])}
    source.write_text("// two")
    names.add(library_name(LEVEL))
    names.add(library_name(Level("other", "x86_64", frozenset(), ("-g",))))
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    names.add(library_name(LEVEL))
    assert len(names) == 5


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "gone"])
def test_a_damaged_library_is_built_again(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    built = build(LEVEL, tmp_path)
    contents = built.read_bytes()
    damaged = {"cut": contents[:-1], "changed": b"x" + contents[1:], "empty": b"", "gone": None}[damage]
    built.unlink()
    if damaged is not None:
        built.write_bytes(damaged)
        built.chmod(0o755)
    assert find_built(LEVEL, (tmp_path,)) is None
    assert find_built(LEVEL, (build(LEVEL, tmp_path).parent,)) == built
    assert built.read_bytes() == contents


def test_what_others_can_write_is_not_run(compilations: Path, tmp_path: Path) -> None:
    built = build(LEVEL, tmp_path)
    built.chmod(0o777)
    assert find_built(LEVEL, (tmp_path,)) is None


def test_of_builders_beside_each_other_one_compiles(compilations: Path, tmp_path: Path) -> None:
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        build(LEVEL, tmp_path / "cache")

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compilations.read_text().count("one") == 1
    assert find_built(LEVEL, (tmp_path / "cache",)) is not None
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_nobody_waits_for_a_builder_that_was_killed(compilations: Path, tmp_path: Path) -> None:
    program = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-uc", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout is not None
        builder.stdout.readline()
        waiting = threading.Thread(target=build, args=(LEVEL, tmp_path))
        waiting.start()
        builder.kill()
    waiting.join()
    assert compilations.read_text().count("one") == 1


def test_nobody_waits_for_ever_for_who_keeps_the_lock(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr(build_module, "_LOOK_SECONDS", 250.0)
    slept: list[float] = []
    # A separate view of the `time` module, since `subprocess` also sleeps while it waits for the compiler.
    monkeypatch.setattr(build_module, "time", SimpleNamespace(sleep=slept.append))
    with caplog.at_level("INFO", logger=build_module.__name__):
        assert build(LEVEL, tmp_path).is_file()
    os.close(descriptor)
    assert slept == [250.0] * 3
    assert [record.message for record in caplog.records].count(
        f"another process compiles kernels in {tmp_path}: waiting for it"
    ) == 1


def test_a_directory_without_locks_is_built_in(
    compilations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(build_module.fcntl, "flock", refuse)
    assert build(LEVEL, tmp_path).is_file()


def test_what_killed_builders_left_is_removed(compilations: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, age in ((".building-old", 10_000), (".building-new", 0), ("other", 10_000)):
        (cache / name).mkdir(parents=True)
        now = time.time()
        os.utime(cache / name, (now - age, now - age))
    build(LEVEL, cache)
    assert {path.name for path in cache.iterdir()} == {".building-new", "other", library_name(LEVEL)}


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_COMPILERS", ("no-such-compiler",))
    assert trouble_of(tmp_path) == "no C++ compiler (no-such-compiler) is installed"


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler("#!/bin/sh\necho hello >&2\necho 'one.cpp:1: error: no' >&2\nexit 3\n", tmp_path, monkeypatch)
    assert trouble_of(tmp_path) == f"{tmp_path}/compiler exited with status 3: one.cpp:1: error: no"


def test_a_compiler_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler("#!/bin/sh\nexec sleep 60\n", tmp_path, monkeypatch)
    monkeypatch.setattr(build_module, "_COMPILE_SECONDS", 0.05)
    assert trouble_of(tmp_path) == f"{tmp_path}/compiler took over 0.05 s"


def test_a_cache_that_cannot_be_written(compilations: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trouble = trouble_of(tmp_path / "file" / "cache")
    assert trouble == f"{tmp_path}/file/cache cannot be written: Not a directory"


def trouble_of(cache: Path) -> str:
    """Return the reason why no library can be loaded."""
    with pytest.raises(BuildError) as failure:
        load_kernels(cache)
    return str(failure.value)


def test_a_library_that_is_none_of_ours(compilations: Path, tmp_path: Path) -> None:
    assert f"{tmp_path / library_name(levels_here()[0])} cannot be loaded" in trouble_of(tmp_path)


def test_a_level_needs_what_the_cpu_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr("model.kernels.cpu_features.CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [level.name for level in levels_here()] == [], "a system that does not say"
    cpuinfo.write_text("processor : 0\nflags\t\t: sse2 avx2 fma f16c\n\nprocessor : 1\n")
    assert [level.name for level in levels_here()] == ["avx2"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [level.name for level in levels_here()] == []


@pytest.mark.parametrize(
    ("vendor", "best"), [("AuthenticAMD", "avx512bf16"), ("GenuineIntel", "avx512bf16fma"), ("", "avx512bf16fma")]
)
def test_a_level_for_one_vendor_is_chosen_there_alone(
    vendor: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_bytes(b"model name\t: \xff\nflags_of_old\t: none\n")
    with cpuinfo.open("a") as file:
        file.write(f"vendor_id\t: {vendor}\nflags\t\t: {' '.join(sorted(LEVELS[0].needs))}\n")
    monkeypatch.setattr("model.kernels.cpu_features.CPUINFO", cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert levels_here()[0].name == best
    assert runnable_levels()[0].name == "avx512bf16"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_compiler_ends_with_who_asked_for_it(tmp_path: Path, number: signal.Signals) -> None:
    """The compiler and its child processes end, and their unfinished output is removed; also after SIGKILL."""
    told, cache = tmp_path / "told", tmp_path / "cache"
    os.mkfifo(told)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nsleep 1000 &\necho temporary > "$TMPDIR/temporary"\necho $$ $! >{told}\nwait\n')
    compiler.chmod(0o755)
    script = f"""
from pathlib import Path
from model.kernels import build
from model.kernels.cpu_features import levels_here
build._COMPILERS = ({str(compiler)!r},)
build.build(levels_here()[-1], Path({str(cache)!r}))
"""
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as asking:
        programs = [psutil.Process(int(pid)) for pid in told.read_text().split()]
        (keeper,) = psutil.Process(asking.pid).children()
        assert {os.getpgid(program.pid) for program in programs} == {keeper.pid}
        assert all(program.nice() == min(psutil.Process().nice() + 10, 19) for program in programs)
        assert len(list(cache.glob("*/temporary"))) == 1
        asking.send_signal(number)
    assert psutil.wait_procs([keeper, *programs], timeout=60)[1] == []
    assert list(cache.iterdir()) == []
