"""CPUs and memory that this process may use, torch-free.

A container's limits are those of its control group (cgroup). Version 2 of control groups has one tree (`cpu.max`,
`memory.max`). Version 1 has one tree for each controller (`cpu.cfs_quota_us`, `memory.limit_in_bytes`). A machine may
mount both. A group's parents limit it too, so every directory from the process's group to the mount point is read.
Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html

`root`: directory under which a function looks for the system's files: "/", except in tests.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
# Version 1 has no special value for "no limit": the file then holds the largest multiple of the page size below 2^63.
_NO_LIMIT = 2**62
_ESCAPE = re.compile(r"\\([0-7]{3})")  # escaped characters in mountinfo, such as spaces


# For each version's memory controller: files of limit and usage, and the entries of memory.stat for the page cache.
_MEMORY_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    None: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def usable_cpus(root: Path = _ROOT) -> int:
    """Return the number of CPUs this process may use, at least 1: its affinity, limited by the rounded-up CPU quota."""
    count = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return count if quota is None else max(1, min(count, math.ceil(quota)))


def cpu_shares(count: int, root: Path = _ROOT) -> list[set[int]]:
    """Divide the usable CPUs among `count` processes: neighbouring cores, and few sockets each. Some shares are empty
    if there are fewer CPUs.
    """

    def place(cpu: int) -> tuple[int, int, int]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        return _number(topology / "physical_package_id") or 0, _number(topology / "core_id") or 0, cpu

    cpus = sorted(os.sched_getaffinity(0), key=place)[: usable_cpus(root)]
    bounds = [len(cpus) * index // count for index in range(count + 1)]
    return [set(cpus[begin:end]) for begin, end in itertools.pairwise(bounds)]


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the smallest CPU quota of all control groups of this process, in CPUs; None if no group has a quota."""
    found = [_words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us") for group in _groups("cpu", root)]
    found += [_words(group / "cpu.max") for group in _groups(None, root)]
    quotas = (int(words[0]) / int(words[1]) for words in found if len(words) == 2 and all(map(_is_positive, words)))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the smallest memory limit of all control groups of this process, in bytes; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that this process can still allocate on the machine and within every control group's limit.

    The page cache counts as available, because the kernel reclaims it before it kills a process. Swap does not count.
    """
    free = _sizes(root / "proc/meminfo")["MemAvailable"] * 1024
    return max(0, min([free, *(limit - used for limit, used in _memory(root))]))


def own_anonymous_bytes(root: Path = _ROOT) -> int:
    """Return this process's anonymous resident memory (RssAnon) in bytes. A second such process would need as much."""
    return _sizes(root / "proc/self/status")["RssAnon"] * 1024


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Yield, for each control group with a memory limit, this limit and the group's used bytes without page cache."""
    for controller, (limit_file, usage_file, page_cache) in _MEMORY_FILES.items():
        for group in _groups(controller, root):
            limit = _number(group / limit_file)
            if limit is not None and limit < _NO_LIMIT:
                statistics = _sizes(group / "memory.stat")
                cached = sum(statistics.get(name, 0) for name in page_cache)
                yield limit, max(0, (_number(group / usage_file) or 0) - cached)


def _groups(controller: str | None, root: Path) -> Iterator[Path]:
    """Yield the directories of this process's control group and of its parents. controller: None for version 2."""
    group = _own_group(controller, root)
    if group is None:
        return
    for mounted, mount_point in _mounts(controller, root):
        # In a container, the root of the mount is often the container's own group, named by its path on the host.
        inside = group.relative_to(mounted) if group.is_relative_to(mounted) else PurePosixPath()
        directory = mount_point / inside
        if ".." in inside.parts or not directory.is_dir():
            directory = mount_point
        yield directory
        yield from (parent for parent in directory.parents if parent.is_relative_to(mount_point))


def _own_group(controller: str | None, root: Path) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number == "0" and not controllers) if controller is None else controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _mounts(controller: str | None, root: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield the root group and the mount point of each mount of a controller's cgroup tree, by /proc/self/mountinfo.

    Fields of a line: ID, parent, device, root, mount point, options, any number of optional fields, a hyphen, file
    system type, source, file system options. Source: https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
    """
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields, types = mount.split(" "), file_system.split(" ")
        if len(fields) < 5 or len(types) < 3:
            continue
        is_wanted = types[0] == "cgroup2" if controller is None else controller in types[2].split(",")
        if is_wanted and types[0] in ("cgroup", "cgroup2"):
            group, mount_point = (_ESCAPE.sub(lambda match: chr(int(match[1], 8)), field) for field in fields[3:5])
            yield PurePosixPath(group), root / mount_point.lstrip("/")


def _sizes(path: Path) -> dict[str, int]:
    """Return the numbers in a file such as /proc/meminfo by their names. Units are dropped ("MemTotal: 4096 kB")."""
    lines = (line.split() for line in _lines(path))
    return {words[0].removesuffix(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and _is_positive(words[0]) else None


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _is_positive(word: str) -> bool:
    return word.isascii() and word.isdecimal() and int(word) > 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def has_nvidia_driver(root: Path = _ROOT) -> bool:
    """Return True if NVIDIA's driver runs on this machine, by its device file, without CUDA."""
    return (root / "dev" / "nvidiactl").exists()
