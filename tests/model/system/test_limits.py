"""CPU and memory limits of cgroups v1 and v2, in file trees that stand for / ."""

from pathlib import Path

import pytest

from model.system.limits import (
    available_memory_bytes,
    cpu_quota,
    cpu_shares,
    memory_limit_bytes,
    own_anonymous_bytes,
    usable_cpus,
)

V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1 = V1_CPU + V1_MEMORY
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
NO_LIMIT_V1 = 9223372036854771712
MEMINFO = "MemTotal: 4000 kB\nMemFree: 1 kB\nMemAvailable: 3000 kB\nHugePages_Total: 0\n"


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """Write the files that a process reads: its cgroups, the mounts, and files below /sys/fs/cgroup."""
    here = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, "proc/meminfo": MEMINFO}
    for name, text in {**here, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1_memory(path: str, limit: int, usage: int = 0, page_cache: int = 0) -> dict[str, str]:
    statistics = f"cache {page_cache}\ninactive_file 1\ntotal_inactive_file {page_cache // 2}\n"
    statistics += f"total_active_file {page_cache - page_cache // 2}\n"
    return {
        f"memory{path}/memory.limit_in_bytes": f"{limit}\n",
        f"memory{path}/memory.usage_in_bytes": f"{usage}\n",
        f"memory{path}/memory.stat": statistics,
    }


def v2_memory(path: str, limit: int | str, usage: int = 0, page_cache: int = 0) -> dict[str, str]:
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.current": f"{usage}\n",
        f"{path}/memory.stat": f"anon 5\ninactive_file {page_cache // 4}\nactive_file {page_cache - page_cache // 4}\n",
    }


def cpus(path: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{path}/cpu.cfs_quota_us": f"{quota}\n", f"{path}/cpu.cfs_period_us": f"{period}\n"}


def test_limits_of_version_2_control_groups_are_read(tmp_path: Path) -> None:
    files = {"a/cpu.max": "150000 100000\n", **v2_memory("a", 1_500_000, 600_000, 100_000)}
    root = tree(tmp_path, "0::/a\n", V2, files)
    assert (cpu_quota(root), memory_limit_bytes(root)) == (1.5, 1_500_000)
    assert available_memory_bytes(root) == 1_000_000


def test_limits_of_version_1_control_groups_are_read(tmp_path: Path) -> None:
    files = {**cpus("cpu,cpuacct/a", 50_000), **v1_memory("/b", 1_500_000, 600_000, 100_000)}
    root = tree(tmp_path, "9:name=systemd:/x\n5:cpu,cpuacct:/a\n4:memory:/b\n0::/\n", V1, files)
    assert (cpu_quota(root), memory_limit_bytes(root)) == (0.5, 1_500_000)
    assert available_memory_bytes(root) == 1_000_000


def test_without_limits_only_the_machines_memory_counts(tmp_path: Path) -> None:
    version_2 = tree(tmp_path / "2", "0::/\n", V2, {"cpu.max": "max 100000\n", **v2_memory("", "max", 9)})
    files = {**cpus("cpu,cpuacct", -1), **v1_memory("", NO_LIMIT_V1, 9)}
    version_1 = tree(tmp_path / "1", "2:cpu,cpuacct:/\n1:memory:/\n", V1, files)
    nothing = tree(tmp_path / "0", "", "", {})
    for root in (version_2, version_1, nothing):
        assert (cpu_quota(root), memory_limit_bytes(root)) == (None, None)
        assert available_memory_bytes(root) == 3000 * 1024


def test_hybrid_control_groups_are_read_as_version_1(tmp_path: Path) -> None:
    files = {"unified/cgroup.controllers": "\n", **cpus("cpu,cpuacct", 200_000), **v1_memory("/a", 700_000)}
    root = tree(tmp_path, "2:cpu,cpuacct:/\n1:memory:/a\n0::/\n", V1 + HYBRID, files)
    assert (cpu_quota(root), memory_limit_bytes(root)) == (2.0, 700_000)


@pytest.mark.parametrize("outer", [900_000, 400_000])
def test_the_limit_of_a_parent_group_applies(tmp_path: Path, outer: int) -> None:
    inner = 500_000
    version_2 = tree(
        tmp_path / "2",
        "0::/outer/inner\n",
        V2,
        {
            "outer/cpu.max": f"{outer} 100000",
            "outer/inner/cpu.max": f"{inner} 100000",
            **v2_memory("outer", outer, 300_000),
            **v2_memory("outer/inner", inner, 1000),
        },
    )
    version_1 = tree(
        tmp_path / "1",
        "2:cpu,cpuacct:/outer/inner\n1:memory:/outer/inner\n",
        V1,
        {
            **cpus("cpu,cpuacct/outer", outer),
            **cpus("cpu,cpuacct/outer/inner", inner),
            **v1_memory("/outer", outer, 300_000),
            **v1_memory("/outer/inner", inner, 1000),
        },
    )
    for root in (version_2, version_1):
        assert cpu_quota(root) == min(outer, inner) / 100_000
        assert memory_limit_bytes(root) == min(outer, inner)
        # The other processes of the parent cgroup use memory too.
        assert available_memory_bytes(root) == min(outer - 300_000, inner - 1000)


@pytest.mark.parametrize("mounted", ["/docker/4f", "/"])
def test_a_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path, mounted: str) -> None:
    """/proc/self/cgroup has the host's path of the cgroup, which does not exist below the mount point."""
    mounts = V1.replace(" / ", f" {mounted} ")
    root = tree(tmp_path, "2:cpu,cpuacct:/docker/4f\n1:memory:/docker/4f\n", mounts, v1_memory("", 123_456))
    assert memory_limit_bytes(root) == 123_456


@pytest.mark.parametrize("group", ["/../other", "/../../sys/fs"])
def test_a_group_outside_the_namespace_is_read_at_the_mount_point(tmp_path: Path, group: str) -> None:
    root = tree(tmp_path, f"0::{group}\n", V2, {**v2_memory("", 5000), **v2_memory("../other", 1)})
    assert memory_limit_bytes(root) == 5000


def test_a_mount_point_with_a_space_is_read(tmp_path: Path) -> None:
    mounts = V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040tree")
    assert memory_limit_bytes(tree(tmp_path, "0::/\n", mounts, v2_memory("my tree", 77_777))) == 77_777


@pytest.mark.parametrize("garbage", ["", "x y z", "-5", "1 0", "\udcff", "²"])
def test_unreadable_limits_count_as_no_limit(tmp_path: Path, garbage: str) -> None:
    names = ("cpu.max", "memory.max", "memory.current", "memory.stat")
    root = tree(tmp_path / "2", "junk\n0::/\n", "short line\n" + V2, {})
    for name in names:
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(garbage.encode(errors="surrogateescape"))
    assert (cpu_quota(root), memory_limit_bytes(root)) == (None, None)
    assert available_memory_bytes(root) == 3000 * 1024


def test_own_anonymous_bytes_reads_rss_anon(tmp_path: Path) -> None:
    path = tmp_path / "proc/self/status"
    path.parent.mkdir(parents=True)
    path.write_text("Name:\tpython 1\nRssAnon:\t  2048 kB\nRssFile:\t  4096 kB\nThreads:\t1\n")
    assert own_anonymous_bytes(tmp_path) == 2 * 2**20


def test_available_memory_is_never_negative(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", V2, v2_memory("", 1000, 5000))
    assert available_memory_bytes(root) == 0


def test_the_cpu_quota_limits_the_usable_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    quotas = (("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8))
    for number, (quota, count) in enumerate(quotas):
        assert usable_cpus(tree(tmp_path / str(number), "0::/\n", V2, {"cpu.max": quota})) == count


def test_cpus_are_shared_out_by_socket_and_core_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight CPUs: two sockets of two cores each, numbered as on servers, where each core's second thread comes last."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    unlimited = tree(tmp_path / "a", "0::/\n", V2, {})
    limited = tree(tmp_path / "b", "0::/\n", V2, {"cpu.max": "300000 100000"})
    for root in (unlimited, limited):
        for cpu in range(8):
            topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
            (topology / "core_id").write_text(f"{cpu % 2}\n")
    assert cpu_shares(2, unlimited) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert cpu_shares(3, unlimited) == [{0, 4}, {1, 5, 2}, {6, 3, 7}]
    assert cpu_shares(2, limited) == [{0}, {4, 1}]
