"""Compile the native kernels to one shared library per CPU level. Torch-free.

    python -m model.kernels.build [--directory DIRECTORY] [--local]

The command builds every level of this machine's architecture, for example for a container image. The default directory
is beside the sources, where every process looks first. `--local` builds only the best level for this machine, into the
cache, as a service does at its first start.

A library's name contains a hash of the sources, the flags and the architecture. PyTorch is not part of the hash,
because kernels use none of its headers or libraries. The compiler is not part of it either: an image built elsewhere
may have no compiler.

A library file ends with the SHA-256 of the bytes before, so truncated or damaged files are never loaded. The file is
written under a temporary name and renamed. Of several processes that need a library of one directory, one process
compiles and the other processes wait for a lock.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from model.kernels.cpu_features import LEVELS, CpuLevel, levels_here

SOURCES = Path(__file__).parent / "src"
# Directory of the libraries shipped in an image or a package.
SHIPPED = Path(__file__).parent / "built"


def cache_directory() -> Path:
    """Return the default cache: $XDG_CACHE_HOME/kvasir if the variable is an absolute path, else ~/.cache/kvasir.

    Source: https://specifications.freedesktop.org/basedir-spec/latest/ (relative paths must be ignored).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache")) / "kvasir"


# Directory of the libraries compiled on this machine, unless --cache-dir names another.
CACHE = cache_directory()
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    "-ffp-contract=off",  # no implicit fused multiply-add: results are bitwise identical wherever a function is inlined
)
_UNFINISHED = ".building-"
_DIGEST_BYTES = hashlib.sha256().digest_size
_COMPILE_SECONDS = 600.0  # limit for one call of the compiler


class BuildError(RuntimeError):
    """No library exists and none can be built; the message is one line with the reason."""


def library_name(level: CpuLevel) -> str:
    """Return the file name of a level's library, which depends on sources, flags and the machine's architecture."""
    digest = hashlib.sha256(repr((_FLAGS, level.flags, platform.machine(), sys.platform)).encode())
    for path in _sources("*.h") + _sources("*.cpp"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"kvasir-{level.name}-{digest.hexdigest()[:16]}.so"


def find_built(level: CpuLevel, directories: Sequence[Path]) -> Path | None:
    """Return the level's library from the first directory that has an intact, trusted file; None: no directory has one.

    A file is trusted if only root or this user could have written it.
    """
    paths = (directory / library_name(level) for directory in directories)
    return next((path for path in paths if _is_ours(path) and _is_whole(path)), None)


def build(level: CpuLevel, directory: Path) -> Path:
    """Compile the level's library into a directory, which is created if necessary. Return the library's path.

    If another process is building there, wait, and return the library that it built.

    Raises:
        BuildError: there is no compiler, it fails or takes too long, or the directory cannot be written.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(_COMPILERS)}) is installed; install one of them")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(directory), tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=directory) as scratch:
            if (built := find_built(level, (directory,))) is not None:
                return built
            _remove_abandoned(directory, made_seconds=Path(scratch).stat().st_mtime)
            made = Path(scratch) / "kernels.so"
            _compile(compiler, level, made)
            contents = made.read_bytes()
            made.write_bytes(contents + hashlib.sha256(contents).digest())
            made.chmod(0o755)
            return made.rename(directory / library_name(level))
    except OSError as error:
        raise BuildError(f"{directory} cannot be written: {error.strerror}; choose another directory") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which the system releases if the process ends.

    On a file system without locks, the body runs without the lock: compiling twice does no harm.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, level: CpuLevel, made: Path) -> None:
    """Compile all sources in parallel and link them into `made`; the compilers' temporary files lie beside `made`."""
    scratch = made.parent.resolve()

    def run(*arguments: str | Path) -> None:
        # Niceness 10 lets other processes run first, and leaves the compilers about a tenth of a busy CPU.
        command = ["nice", "-n", "10", compiler, *_FLAGS, *level.flags, *arguments]
        environment = {**os.environ, "TMPDIR": str(scratch)}
        try:
            subprocess.run(
                command, cwd=SOURCES, env=environment, check=True, capture_output=True, timeout=_COMPILE_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} took over {_COMPILE_SECONDS:g} s; try again on a less busy machine") from None
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode(errors="replace").strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "no error output")
            raise BuildError(f"{compiler} exited with status {error.returncode}: {first}") from None

    objects = {source: scratch / f"{source.name}.o" for source in _sources("*.cpp")}
    with ThreadPoolExecutor(max_workers=len(objects)) as pool:
        list(pool.map(lambda source: run("-c", source, "-o", objects[source]), objects))
    run(*objects.values(), "-o", scratch / made.name)


def _remove_abandoned(directory: Path, *, made_seconds: float) -> None:
    """Remove temporary directories that killed builds left behind long ago.

    Ages are relative to `made_seconds`, the modification time of a new directory, so the file system's clock counts.
    """
    for path in directory.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # another process removed it first
            if made_seconds - path.stat().st_mtime > 2 * _COMPILE_SECONDS:
                shutil.rmtree(path)


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _is_ours(path: Path) -> bool:
    """Return whether the file exists and only this user or root could have written it: loading it runs its code."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _is_whole(path: Path) -> bool:
    try:
        contents = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(contents[:-_DIGEST_BYTES]).digest() == contents[-_DIGEST_BYTES:]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit codes: 0 built, 1 failed."""
    parser = argparse.ArgumentParser(prog="python -m model.kernels.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--directory", type=Path, default=SHIPPED, help=f"where to write the libraries (default: {SHIPPED})"
    )
    parser.add_argument(
        "--local", action="store_true", help=f"build only the best level for this processor, into {CACHE}"
    )
    arguments = parser.parse_args(argv)
    levels = [level for level in LEVELS if level.machine == platform.machine()]
    directory: Path = arguments.directory
    if arguments.local:
        levels, directory = list(levels_here()[:1]), CACHE.expanduser()
    try:
        for level in levels:
            print(build(level, directory))
    except BuildError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
