"""Which instructions a machine has: the levels that every kernel is compiled for. Torch-free."""

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """One set of instructions.

    machine: by `platform.machine()`; None for any. needs: the CPU's features as /proc/cpuinfo writes them.
    flags: what the compiler is told. vendor: of the CPUs that it is the best for; None for any.
    """

    name: str
    machine: str | None
    needs: frozenset[str]
    flags: tuple[str, ...]
    vendor: str | None = None


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_NEEDS = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})

_AVX512BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_AVX512BF16_NEEDS = _AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"}

# Best first. The dot product of bfloat16 pairs does twice the work of a multiply-add on AMD's Zen 4, and half of it on
# Intel's Emerald Rapids, where matrices are widened to floats instead.
LEVELS = (
    Level("avx512bf16", "x86_64", _AVX512BF16_NEEDS, (*_AVX512BF16, "-DKVASIR_BF16_DOT"), vendor="AuthenticAMD"),
    Level("avx512bf16fma", "x86_64", _AVX512BF16_NEEDS, _AVX512BF16),
    Level("avx512", "x86_64", _AVX512_NEEDS, _AVX512),
    Level("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"}), _AVX2),
    Level("portable", None, frozenset(), ()),
)


def runnable_levels() -> tuple[Level, ...]:
    """Those whose instructions this machine has; never empty."""
    machine, features = platform.machine(), _cpu_has("flags")
    return tuple(level for level in LEVELS if level.machine in (None, machine) and level.needs <= features)


def levels_here() -> tuple[Level, ...]:
    """Those of them for CPUs of this vendor, best first; never empty."""
    vendor = _cpu_has("vendor_id")
    return tuple(level for level in runnable_levels() if level.vendor is None or level.vendor in vendor)


def has_vector_level() -> bool:
    """Return whether this machine has a level above `portable`, whose scalar loops oneDNN's kernels outrun."""
    return levels_here()[0].name != "portable"


def _cpu_has(what: str) -> frozenset[str]:
    """The words of a line of the first CPU, as far as the system lists it."""
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset(next((words.split() for name, _, words in named if name.strip() == what), ()))
