"""Which instructions a machine has: the levels that every kernel is compiled for. Torch-free."""

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """One set of instructions.

    machine: by `platform.machine()`; None for any. needs: the CPU's features as /proc/cpuinfo writes them.
    flags: what the compiler is told.
    """

    name: str
    machine: str | None
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_NEEDS = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})

# Best first.
LEVELS = (
    Level(
        "avx512bf16",
        "x86_64",
        _AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"},
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    ),
    Level("avx512", "x86_64", _AVX512_NEEDS, _AVX512),
    Level("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"}), _AVX2),
    Level("portable", None, frozenset(), ()),
)


def levels_here() -> tuple[Level, ...]:
    """Those this machine can run, best first; never empty."""
    machine, features = platform.machine(), _features()
    return tuple(level for level in LEVELS if level.machine in (None, machine) and level.needs <= features)


def has_vector_level() -> bool:
    """Return whether this machine has a level above `portable`, whose scalar loops oneDNN's kernels outrun."""
    return levels_here()[0].name != "portable"


def _features() -> frozenset[str]:
    """Features of the CPU, as far as the system lists them."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, ()))
