"""Deficient machines: the service starts anyway or reports in one line why not."""

import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from service.worker.worker import CheckpointChanged, check_unchanged, stamps_of
from tests.e2e.process import (
    PATIENCE_SECONDS,
    START_SECONDS,
    Service,
    clean_environment,
    command,
    free_port,
    serving,
    wait_until,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def limited(limit: int, value: int, command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` under a resource limit."""
    program = (
        f"import os, resource, sys; resource.setrlimit({limit}, ({value}, {value})); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-I", "-S", "-c", program, *command]


@pytest.mark.parametrize(
    ("limit", "value", "flags", "said"),
    [
        (resource.RLIMIT_NOFILE, 64, (), "this process may have only 64 files open"),
        # Enough memory for the libraries, which would print errors of their own, and too little for the KV-cache.
        (resource.RLIMIT_AS, 2500 * 2**20, ("--kv-cache-memory", "8000"), "lower --kv-cache-memory"),
        (resource.RLIMIT_FSIZE, 2048, (), "refused a resource: [Errno 27] File too large"),
    ],
)
def test_missing_machine_resources_cause_a_one_line_error(
    tiny_checkpoint: Path, limit: int, value: int, flags: Sequence[str], said: str
) -> None:
    ended = subprocess.run(
        limited(limit, value, command(tiny_checkpoint, free_port(), "--log-level", "warning", *flags)),
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert ended.returncode in (1, 2)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("kvasir serve: ")
    assert said in line


def test_the_service_survives_a_full_disk_behind_its_log(tiny_checkpoint: Path, tmp_path: Path) -> None:
    port = free_port()
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command(tiny_checkpoint, port), stdout=full, stderr=full, env=clean_environment())
    service = Service(process, f"http://127.0.0.1:{port}", tmp_path / "no log", tmp_path / "nothing")
    try:
        wait_until(lambda: process.poll() is not None or service.is_ready(), seconds=START_SECONDS, what="the service")
        assert process.poll() is None
        assert service.text("once", max_tokens=2) is not None
        assert service.post(prompt="", max_tokens=2).status_code == 400
    finally:
        code = service.stop()
    assert code == 0


def test_existing_connections_are_served_at_the_limit_of_open_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The limit is lowered in the running service, so the system rejects connections, not the service."""
    with (
        serving(tiny_checkpoint, tmp_path) as service,
        httpx.Client(base_url=service.url, timeout=PATIENCE_SECONDS) as client,
    ):
        api = service.api
        body = {"prompt": "once", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        limits = resource.prlimit(api.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(api.pid, resource.RLIMIT_NOFILE, (api.num_fds() + 4, limits[1]))
        address = ("127.0.0.1", urlsplit(service.url).port or 0)
        with ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(socket.create_connection(address, timeout=PATIENCE_SECONDS))
            assert [client.post("/v1/completions", json=body).status_code for _ in range(5)] == [200] * 5
            assert api.cpu_percent(interval=1.5) < 50, "it accepts in vain, again and again"
        resource.prlimit(api.pid, resource.RLIMIT_NOFILE, limits)
        assert service.text("once", max_tokens=2) is not None
        assert len(service.log.read_text()) < 20_000


def test_a_deleted_checkpoint_affects_only_the_next_worker(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, checkpoint)
    with serving(checkpoint, tmp_path) as service:
        before = service.text("once", max_tokens=8, temperature=0)
        shutil.rmtree(checkpoint)
        assert service.text("once", max_tokens=8, temperature=0) == before
        service.worker.send_signal(signal.SIGKILL)
        assert service.process.wait(START_SECONDS) == 1
        log = service.log.read_text()
        assert "the worker cannot be replaced, because the checkpoint has changed" in log.splitlines()[-1]
        assert str(checkpoint) in log
        assert "Traceback" not in log


def test_a_replaced_checkpoint_is_not_mixed_with_the_old_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, checkpoint)
    stamps = stamps_of(checkpoint.glob("*.safetensors"))
    check_unchanged(stamps)
    (weights,) = stamps
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointChanged, match="has changed since the service started; restart the service"):
        check_unchanged(stamps)
    weights.unlink()
    with pytest.raises(CheckpointChanged, match="No such file or directory; restore the file"):
        check_unchanged(stamps)


def test_only_dates_use_the_wall_clock() -> None:
    """Durations and timeouts use the monotonic clock, since the wall clock can be set."""
    sources = [path for package in ("service", "model") for path in (ROOT / package).rglob("*.py")]
    by_wall = [line.strip() for path in sources for line in path.read_text().splitlines() if "time.time()" in line]
    assert by_wall
    dates = re.compile(r"\b(created|created_seconds|completed_at|observed_at|published_at|scraped_at)\b")
    assert [line for line in by_wall if not dates.search(line)] == []
