"""Memory and CPU time of the service's processes, read from /proc (proc(5))."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessUsage(NamedTuple):
    """Resources of one process. `cpu_seconds`: of all its threads since it started, in user and in kernel mode."""

    pid: int
    name: str
    resident_bytes: int
    cpu_seconds: float


def read_processes(pid: int) -> Iterator[ProcessUsage]:
    """Yield the resources of a process and of all its descendants, except those that end meanwhile."""
    folder = Path(f"/proc/{pid}")
    with suppress(OSError):
        name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
        yield ProcessUsage(pid, name, int(fields[21]) * _PAGE_BYTES, cpu_seconds)
        for thread in (folder / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from read_processes(int(child))
