"""Where a figure comes from: commit, machine, versions, time, command. Without them it is worth nothing."""

import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "litserve", "uvicorn", "numpy", "locust")
_QUIET_CORES = 0.2
_ROOT = Path(__file__).resolve().parent.parent


def provenance(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """A JSON-ready account of this run. `program` and `arguments`: the command as a person would type it."""
    return {
        "command": shlex.join([*program.split(), *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def tell(result: dict[str, Any], out: Path | None) -> None:
    """Write a result as JSON: to a file (its directory is made, its name printed), to standard output without one."""
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)


def other_work(seconds: float = 1.0) -> float:
    """Cores that are busy now, before we have anything to do; NaN where the system does not tell.

    A thread of the model's that shares its core holds up all the others: a figure from a busy machine is worth little.
    """
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / seconds


def quiet_or_warned(program: str) -> float:
    """`other_work`, and a warning on stderr where it is more than a little."""
    cores = other_work()
    if cores > _QUIET_CORES:
        print(f"{program}: warning: other work keeps {cores:.1f} cores busy; do not trust the figures", file=sys.stderr)
    return round(cores, 2)


def busy_seconds() -> float:
    """CPU time that all cores have spent on work since the machine started (proc(5), /proc/stat)."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return math.nan
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system() + " " + platform.machine(),
    }


def _commit() -> str:
    """The commit of the working tree, marked when files differ from it; 'unknown' outside a checkout.

    Results themselves are no difference: they are what a run writes.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with local changes" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _versions() -> dict[str, str]:
    known = {}
    for package in _PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known
