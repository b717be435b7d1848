"""From the sources here to a library: one compiler's call, no headers but the C++ library's, so seconds. Torch-free.

    python -m model.kernels.build [--directory DIRECTORY]

builds every level of this kind of machine, for an image; without a directory, beside the sources, where every process
looks first. `--local` builds only the best level of this machine in the cache, as a service does for itself.

A library is named by what it depends on: sources, flags, kind of machine. Not by PyTorch, whose headers and libraries
it does not use, nor by the compiler, which is not there where an image has been built elsewhere. A file ends with the
SHA-256 of what is before, so that half a file, or a damaged one, is never loaded. It is written under another name and
renamed. Of several who want it in one directory one builds, and the others wait for it, but not for ever.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from model.kernels.levels import LEVELS, Level, levels_here
from model.parent_death import bound_to_us

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# Where an image or a package has them.
SHIPPED = SOURCES / "built"


def cache_directory() -> Path:
    """Return the default cache: $XDG_CACHE_HOME/kvasir if the variable is an absolute path, else ~/.cache/kvasir.

    Source: https://specifications.freedesktop.org/basedir-spec/latest/, which has relative paths ignored.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path("~/.cache")) / "kvasir"


# Where libraries that this machine has compiled are kept, unless --cache-dir names another directory.
CACHE = cache_directory()
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    "-ffp-contract=off",  # a * b + c is what is written on every level: the same bits wherever a function is inlined
)
_UNFINISHED = ".building-"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Compiles each source in a process of its own, then links them: a service waits for this at its first start. The shell
# stays beside the compilers, in their process group: when it is told to end, as the kernel does when the process that
# asked for the library ends, it ends all of them and removes their files. Other processes go first, but a busy CPU
# leaves a niceness of 10 a tenth of its time; at 19 it would be a hundredth.
_KEEPER = """
made=$1 sources=$2
shift 2
scratch=${made%/*}
trap 'trap "" TERM; kill 0; rm -rf "$scratch"; exit 1' TERM
export TMPDIR=$scratch
compilers=
for source in $sources; do
    nice -n 10 "$@" -c "$source" -o "$scratch/${source##*/}.o" &
    compilers="$compilers $!"
done
for each in $compilers; do
    wait "$each" || exit
done
nice -n 10 "$@" "$scratch"/*.o -o "$made" &
wait "$!"
"""
# A compiler that takes longer is given up.
_COMPILE_SECONDS = 600.0
_LOOK_SECONDS = 0.2


class BuildError(RuntimeError):
    """There is no library and none can be made; one line says why."""


def library_name(level: Level) -> str:
    """The file's name: the same for the same sources, flags and kind of machine."""
    digest = hashlib.sha256(repr((_FLAGS, level.flags, platform.machine(), sys.platform)).encode())
    for path in _sources("*.h") + _sources("*.cpp"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"kvasir-{level.name}-{digest.hexdigest()[:16]}.so"


def find_built(level: Level, directories: Sequence[Path]) -> Path | None:
    """The level's library in the first of the directories that has it whole, and nobody else could have written."""
    paths = (directory / library_name(level) for directory in directories)
    return next((path for path in paths if _is_ours(path) and _is_whole(path)), None)


def build(level: Level, directory: Path) -> Path:
    """Compile the level's library into a directory, which is made; or wait until another has done it there.

    Raises:
        BuildError: no compiler, one that fails, or a directory that cannot be written.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(_COMPILERS)}) is installed")
    if shutil.which("sh") is None:
        raise BuildError("no shell (sh) is installed, which a compiler is started by")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone_in(directory), tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=directory) as scratch:
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
        raise BuildError(f"{directory} cannot be written: {error.strerror}") from error


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which goes with its holder; without it where the file system has none, or where
    somebody keeps it for longer than compiling takes: to compile twice does no harm."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _wait_for(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, directory: Path) -> None:
    waited = 0.0
    while waited < _COMPILE_SECONDS:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waited:
                logger.info("another process compiles kernels in %s: waiting for it", directory)
            time.sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
        except OSError:
            return
        else:
            return


def _compile(compiler: str, level: Level, made: Path) -> None:
    """Compile the sources into `made`, whose directory holds the compilers' files and goes if this process ends."""
    sources = " ".join(path.name for path in _sources("*.cpp"))
    command = ["sh", "-c", _KEEPER, "sh", str(made.resolve()), sources, compiler, *_FLAGS, *level.flags]
    command = bound_to_us(command, signal.SIGTERM)
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, cwd=SOURCES, stdin=nothing, stdout=nothing, stderr=pipe, process_group=0) as keeper:
        try:
            _, said = keeper.communicate(timeout=_COMPILE_SECONDS)
        except BaseException as error:
            keeper.terminate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{compiler} took over {_COMPILE_SECONDS:g} s") from None
            raise
    if keeper.returncode != 0 or not made.is_file():
        lines = said.decode(errors="replace").strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "it said nothing")
        raise BuildError(f"{compiler} ended with {keeper.returncode}: {first}")


def _remove_abandoned(directory: Path, *, made_seconds: float) -> None:
    """What is left of builders that were killed long before something was made there, by the file system's clock."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # another one was faster
            if made_seconds - path.stat().st_mtime > 2 * _COMPILE_SECONDS:
                shutil.rmtree(path)


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _is_ours(path: Path) -> bool:
    """Whether it is there, and only we or root could have written it: what is loaded is run."""
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
    """The command. Exit codes: 0 built, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m model.kernels.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--directory", type=Path, default=SHIPPED, help=f"default: {SHIPPED}")
    parser.add_argument("--local", action="store_true", help=f"only this processor's best level, in {CACHE}")
    arguments = parser.parse_args(argv)
    levels = [level for level in LEVELS if level.machine in (None, platform.machine())]
    directory: Path = arguments.directory
    if arguments.local:
        levels, directory = [levels_here()[0]], CACHE.expanduser()
    try:
        for level in levels:
            print(build(level, directory))
    except BuildError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
