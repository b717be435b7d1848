"""Where a figure comes from: commit, machine, versions, time, command. Without them it is worth nothing."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "litserve", "uvicorn", "numpy", "locust")
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


def machine() -> dict[str, Any]:
    """Processor, cores, memory, and how busy the machine was with other work when asked."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system() + " " + platform.machine(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
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
