"""Provenance of benchmark results: commit, machine, versions, date, command, and CPU use of other processes."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "litserve", "uvicorn", "numpy", "locust")
_QUIET_CORES = 0.2
_ROOT = Path(__file__).resolve().parents[2]


def provenance(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command, date, Git commit, machine and package versions of this benchmark run, JSON-ready."""
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    packages = (package for name in _PACKAGES for package in list(importlib.metadata.distributions(name=name))[:1])
    return {
        "command": shlex.join([*program.split(), *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": {
            "processor": named[1] if named else platform.processor() or "unknown",
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.system() + " " + platform.machine(),
        },
        "versions": {"python": platform.python_version()} | {package.name: package.version for package in packages},
    }


def _commit() -> str:
    """Return the Git commit of the checkout, marked if files outside docs/ have changes; 'unknown' without Git."""
    try:
        head, changed = (
            subprocess.check_output(["git", *arguments], cwd=_ROOT, text=True, stderr=subprocess.DEVNULL).strip()
            for arguments in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with local changes" if changed else head


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Write a benchmark result as JSON to the file `out` and print its path; without `out`, print the JSON."""
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)


class ForeignWork:
    """Meter of CPU use by other processes: CPU time of all cores minus that of this process and its children."""

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        """Return the mean number of cores that other processes kept busy since this meter was created, at least 0."""
        seconds, busy, own = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / seconds)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return clock time, CPU seconds of all cores, and those of this process and its children, ended or not."""
        counts = [os.times()[:4]]
        for process in psutil.Process().children(recursive=True):
            try:
                counts.append(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return time.monotonic(), _busy_seconds(), sum(map(sum, counts))


def _busy_seconds() -> float:
    """Return the seconds since boot that all cores together were not idle (proc(5), /proc/stat)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure_other_work(program: str) -> float:
    """Return the number of cores that other processes keep busy, measured for one second. Warn if above 0.2 cores."""
    foreign = ForeignWork()
    time.sleep(1.0)
    if (cores := foreign.cores()) > _QUIET_CORES:
        warning = f"warning: other processes keep {cores:.1f} cores busy; do not trust the figures of this run"
        print(f"{program}: {warning}", file=sys.stderr)
    return round(cores, 2)


def digest(result: object) -> str:
    """Return a SHA-256 digest of a benchmark result. A picture stores it, so that an outdated picture is detected."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def is_picture_of(path: Path, result: object) -> bool:
    """Return True if the file is a picture that was drawn from this benchmark result, by the stored digest."""
    return path.is_file() and digest(result).encode() in path.read_bytes()
