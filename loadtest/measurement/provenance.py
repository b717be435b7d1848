"""Provenance of a figure: commit, machine, versions, time and command."""

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

_PACKAGES = ("torch", "litserve", "uvicorn", "numpy", "locust")
_QUIET_CORES = 0.2
_ROOT = Path(__file__).resolve().parent.parent.parent


def provenance(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return a JSON-ready account of this run. `program` and `arguments` are the command as typed in a shell."""
    packages = (package for name in _PACKAGES for package in list(importlib.metadata.distributions(name=name))[:1])
    return {
        "command": shlex.join([*program.split(), *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version()} | {package.name: package.version for package in packages},
    }


def tell(result: dict[str, Any], out: Path | None) -> None:
    """Write a result as JSON to a file, or to standard output without one. Prints the file's name."""
    text = json.dumps(result, indent=1) + "\n"
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)


def other_work(seconds: float = 1.0) -> float:
    """Return the number of cores that are busy before a measurement starts.

    Threads of the model wait for each other, so one thread that shares its core slows all.
    """
    before = busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / seconds


def quiet_or_warned(program: str) -> float:
    """Return `other_work`, and warn on standard error if it is not small."""
    cores = other_work()
    if cores > _QUIET_CORES:
        print(
            f"{program}: warning: other processes keep {cores:.1f} cores busy; do not trust the figures",
            file=sys.stderr,
        )
    return round(cores, 2)


def busy_seconds() -> float:
    """Return the CPU time of all cores spent on work since boot (proc(5), /proc/stat)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Return processor, cores and memory."""
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "processor": named[1] if named else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system() + " " + platform.machine(),
    }


def _commit() -> str:
    """Return the commit of the working tree, marked if files differ from it; 'unknown' outside a checkout.

    Changes in docs/ do not count, because a run writes its results there.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with local changes" if changed else head


def digest(result: object) -> str:
    """Return a digest of a result. It is stored in the picture, so that an outdated picture is detected."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def shows(path: Path, result: object) -> bool:
    """Return True if the file is a picture of this result."""
    return path.is_file() and digest(result).encode() in path.read_bytes()
