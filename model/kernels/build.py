"""Compile the native kernels to one shared library per CPU level. Torch-free.

    python -m model.kernels.build [--directory DIRECTORY] [--local]

The command builds every level, for example for a container image, beside the sources, where every process looks first.
`--local` builds only the best level for this machine, into ~/.cache/kvasir, as a service does at its first start.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
# Directory of the libraries shipped in an image or a package.
SHIPPED = Path(__file__).parent / "built"
# Directory of the libraries compiled on this machine, unless --cache-dir names another. Relative paths must be ignored:
# https://specifications.freedesktop.org/basedir-spec/latest/
_XDG_CACHE = Path(os.environ.get("XDG_CACHE_HOME", ""))
CACHE = (_XDG_CACHE if _XDG_CACHE.is_absolute() else Path("~/.cache")) / "kvasir"
CPUINFO = Path("/proc/cpuinfo")
_COMPILERS = ("c++", "g++", "clang++")
_SCRATCH = ".building-"  # prefix of temporary directories
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
    "-ffp-contract=off",  # no implicit fused multiply-add: results are bitwise identical wherever a function is inlined
)


@dataclass(frozen=True)
class CpuLevel:
    """Instruction set of x86-64 CPUs that one kernel library is compiled for.

    needs: required CPU features, as named in the flags line of /proc/cpuinfo. flags: options of the compiler.
    vendor: vendor_id of the CPUs that should prefer this level; None: any.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    vendor: str | None = None


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512VNNI = (*_AVX512, "-mavx512vnni")
_AVX512BF16 = (*_AVX512VNNI, "-mavx512bf16")
_AVX2_NEEDS = frozenset({"avx2", "fma", "f16c"})
_AVX512_NEEDS = _AVX2_NEEDS | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512VNNI_NEEDS = _AVX512_NEEDS | {"avx512_vnni"}
_AVX512BF16_NEEDS = _AVX512VNNI_NEEDS | {"avx512_bf16"}

# Best first. The dot product of bfloat16 pairs has twice the throughput of a float multiply-add on AMD's Zen 4, but
# half on Intel's Emerald Rapids. CPUs of other vendors than AMD therefore widen bfloat16 matrices to float32.
LEVELS = (
    CpuLevel("avx512bf16", _AVX512BF16_NEEDS, (*_AVX512BF16, "-DKVASIR_BF16_DOT"), vendor="AuthenticAMD"),
    CpuLevel("avx512bf16fma", _AVX512BF16_NEEDS, _AVX512BF16),
    CpuLevel("avx512vnni", _AVX512VNNI_NEEDS, _AVX512VNNI),
    CpuLevel("avx512", _AVX512_NEEDS, _AVX512),
    CpuLevel("avx2vnni", _AVX2_NEEDS | {"avx_vnni"}, (*_AVX2, "-mavxvnni")),
    CpuLevel("avx2", _AVX2_NEEDS, _AVX2),
)


class BuildError(RuntimeError):
    """Error if a kernel library is missing and cannot be built. The message is one line with the reason."""


def runnable_levels() -> tuple[CpuLevel, ...]:
    """Return the CPU levels that this machine can run, best first; empty if the kernels do not support the machine."""
    features = _read_cpuinfo("flags") if platform.machine() == "x86_64" else frozenset()
    return tuple(level for level in LEVELS if level.needs <= features)


def levels_here() -> tuple[CpuLevel, ...]:
    """Return the CPU levels that this machine can run, without those for CPUs of another vendor, best first."""
    vendor = _read_cpuinfo("vendor_id")
    return tuple(level for level in runnable_levels() if level.vendor is None or level.vendor in vendor)


def _read_cpuinfo(key: str) -> frozenset[str]:
    """Return the words of the first line of /proc/cpuinfo named `key` ("flags"); empty if there is no such line."""
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset(next((words.split() for name, _, words in named if name.strip() == key), ()))


def library_name(level: CpuLevel) -> str:
    """Return the file name of a level's kernel library, which contains a hash of sources, flags and architecture.

    The compiler is not part of the hash: a machine that gets a library from an image may have no compiler.
    """
    digest = hashlib.sha256(repr((_FLAGS, level.flags, platform.machine(), sys.platform)).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"kvasir-{level.name}-{digest.hexdigest()[:16]}.so"


def find_built(level: CpuLevel, directories: Sequence[Path]) -> Path | None:
    """Return the path of a level's kernel library in the first directory that has a trusted one; None if none has.

    A file is trusted if only root or this user could have written it: loading a library runs its code.
    """
    for path in (directory / library_name(level) for directory in directories):
        if path.is_file() and (status := path.stat()).st_uid in (0, os.getuid()) and not status.st_mode & 0o022:
            return path
    return None


def build(level: CpuLevel, directory: Path) -> Path:
    """Compile a level's kernel library into a directory, which is created if necessary. Return the library's path.

    The file is written under a temporary name and renamed, so other processes never see a part of a library.

    Raises:
        BuildError: the compiler is missing or fails, or the directory cannot be written.
    """
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"the native kernels need a C++ compiler; install one of {', '.join(_COMPILERS)}")
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=directory) as scratch:
            _remove_stale_scratch(directory, Path(scratch).stat().st_mtime)
            made = _compile(compiler, level, Path(scratch).resolve())
            made.chmod(0o755)
            return made.rename(directory / library_name(level))
    except OSError as error:
        raise BuildError(
            f"cannot write the native kernels to {directory}: {error.strerror}; choose another directory"
        ) from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no error output")
        raise BuildError(
            f"cannot compile the native kernels: {compiler} exited with status {error.returncode}: {first}"
        ) from None


def _remove_stale_scratch(directory: Path, now: float) -> None:
    """Remove temporary directories of killed builds: last modified over an hour before `now`, in seconds since 1970."""
    for scratch in directory.glob(f"{_SCRATCH}*"):
        if scratch.stat().st_mtime < now - 3600:
            shutil.rmtree(scratch, ignore_errors=True)


def _compile(compiler: str, level: CpuLevel, scratch: Path) -> Path:
    """Compile the kernels' sources in parallel and link the objects; all temporary files lie in `scratch`."""

    def run(*arguments: str | Path) -> None:
        # Niceness 10 lets other processes run first, and leaves the compilers about a tenth of a busy CPU.
        command = ["nice", "-n", "10", compiler, *_FLAGS, *level.flags, *arguments]
        subprocess.run(command, env={**os.environ, "TMPDIR": str(scratch)}, check=True, capture_output=True)

    objects = {source: scratch / f"{source.name}.o" for source in SOURCES.glob("*.cpp")}
    with ThreadPoolExecutor(max_workers=len(objects)) as pool:
        list(pool.map(lambda source: run("-c", source, "-o", objects[source]), objects))
    run(*objects.values(), "-o", scratch / "kernels.so")
    return scratch / "kernels.so"


def main(argv: Sequence[str] | None = None) -> int:
    """Build the kernel libraries that the arguments name, and print their paths. Return 1 if a build failed, else 0.

    On a CPU that is not x86-64, nothing is built.
    """
    parser = argparse.ArgumentParser(prog="python -m model.kernels.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--directory", type=Path, default=SHIPPED, help=f"directory to write the libraries to (default: {SHIPPED})"
    )
    parser.add_argument(
        "--local", action="store_true", help=f"compile only this CPU's best instruction set, into {CACHE}"
    )
    arguments = parser.parse_args(argv)
    levels, directory = (levels_here()[:1], CACHE.expanduser()) if arguments.local else (LEVELS, arguments.directory)
    try:
        for level in levels if platform.machine() == "x86_64" else ():
            print(f"native kernels for CPU level {level.name}: {build(level, directory)}")
    except BuildError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
