"""CPU instruction-set levels that every kernel is compiled for. Torch-free."""

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class CpuLevel:
    """Set of CPU instructions that one library is compiled for.

    Attributes:
        machine: required value of `platform.machine()`.
        needs: required CPU features, as named in the flags line of /proc/cpuinfo.
        flags: compiler flags.
        vendor: vendor_id of the CPUs that should prefer this level; None: any.
    """

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    vendor: str | None = None


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_NEEDS = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"})

_AVX512BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_AVX512BF16_NEEDS = _AVX512_NEEDS | {"avx512_bf16", "avx512_vnni"}

# Best first. The dot product of bfloat16 pairs has twice the throughput of a float multiply-add on AMD's Zen 4, but
# half on Intel's Emerald Rapids. CPUs of other vendors than AMD therefore widen bfloat16 matrices to float32.
LEVELS = (
    CpuLevel("avx512bf16", "x86_64", _AVX512BF16_NEEDS, (*_AVX512BF16, "-DKVASIR_BF16_DOT"), vendor="AuthenticAMD"),
    CpuLevel("avx512bf16fma", "x86_64", _AVX512BF16_NEEDS, _AVX512BF16),
    CpuLevel("avx512", "x86_64", _AVX512_NEEDS, _AVX512),
    CpuLevel("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"}), _AVX2),
)


def runnable_levels() -> tuple[CpuLevel, ...]:
    """Return the levels that this machine can run, best first; empty if the kernels do not support it."""
    machine, features = platform.machine(), _read_cpuinfo("flags")
    return tuple(level for level in LEVELS if level.machine == machine and level.needs <= features)


def levels_here() -> tuple[CpuLevel, ...]:
    """Return the runnable levels without those for CPUs of another vendor, best first."""
    vendor = _read_cpuinfo("vendor_id")
    return tuple(level for level in runnable_levels() if level.vendor is None or level.vendor in vendor)


def has_vector_level() -> bool:
    """Return whether the kernels support this machine."""
    return bool(levels_here())


def _read_cpuinfo(key: str) -> frozenset[str]:
    """Return the words of one line for the first CPU in /proc/cpuinfo; empty if there is no such line."""
    try:
        lines = CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return frozenset(next((words.split() for name, _, words in named if name.strip() == key), ()))
