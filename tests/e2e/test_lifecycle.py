"""Start, drain and end of a service, and starts that fail, as operators and clients see them."""

import json
import math
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from model.checkpoint.manifest import write_manifest
from model.io.safetensors_header import read_headers
from service.cli.main import main
from tests.e2e.process import (
    NO_TLS,
    PATIENCE_SECONDS,
    START_SECONDS,
    Service,
    alive,
    clean_environment,
    command,
    free_port,
    serving_anew,
    wait_until,
)

pytestmark = pytest.mark.slow

# The tiny model computes these steps in about a second, so that a test can act during the completion.
LONG: dict[str, Any] = {"prompt": "once", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


class Stream(threading.Thread):
    """Client thread that reads one stream to its end. `has_begun` and `finish` raise the error of the thread."""

    def __init__(self, service: Service, path: str = "/v1/completions", **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._fields = service.url + path, fields
        self._error: Exception | None = None
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except Exception as error:
            self._error = error

    def _read(self) -> None:
        body = {**self._fields, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=PATIENCE_SECONDS, verify=NO_TLS) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))

    @property
    def has_begun(self) -> bool:
        if self._error is not None:
            raise self._error
        return len(self.events) > 3

    @property
    def text(self) -> str:
        chunks = [json.loads(event) for event in self.events if event.startswith("{")]
        return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", []))

    def finish(self) -> "Stream":
        self.join(2 * PATIENCE_SECONDS)
        assert not self.is_alive(), "the stream hangs"
        if self._error is not None:
            raise self._error
        return self


def started(streams: list[Stream]) -> Callable[[], bool]:
    return lambda: all(stream.has_begun for stream in streams)


def signal_all(service: Service, number: int) -> list[psutil.Process]:
    """Signal every process of the service, main last, as systemd and a terminal do. Return the processes."""
    children = service.children
    for child in children:
        child.send_signal(number)
    service.process.send_signal(number)
    return [psutil.Process(service.process.pid), *children]


def test_sigterm_drains_the_running_streams(long_checkpoint: Path, tmp_path: Path) -> None:
    with serving_anew(long_checkpoint, tmp_path, "--standby", "--drain-seconds", "3600") as service:
        expected = service.text(**LONG)
        streams = [Stream(service, **LONG) for _ in range(3)]
        wait_until(started(streams), what="the streams to begin")
        worker = service.worker
        worker.suspend()  # so that the streams do not end before the assertions
        family = signal_all(service, signal.SIGTERM)
        wait_until(lambda: service.get("/ready").status_code == 503, what="the drain")
        refused = service.post(prompt="a")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert service.get("/health").status_code == 200
        worker.resume()
        for stream in streams:
            assert stream.finish().text == expected
            assert stream.events[-1] == "[DONE]"
        assert service.process.wait(PATIENCE_SECONDS) == 0
        wait_until(lambda: not alive(family), what="every process to end")
        assert "Traceback" not in service.log.read_text()


def test_a_second_signal_ends_the_drain_at_once(long_checkpoint: Path, tmp_path: Path) -> None:
    with serving_anew(long_checkpoint, tmp_path, "--drain-seconds", "3600") as service:
        stream = Stream(service, **{**LONG, "max_tokens": 8000})
        wait_until(started([stream]), what="the stream to begin")
        signal_all(service, signal.SIGINT)
        wait_until(lambda: service.get("/ready").status_code == 503, what="the drain")
        assert service.stop(signal.SIGINT) == 0
        assert json.loads(stream.finish().events[-1])["error"]["code"] == "draining"


def test_all_processes_end_when_main_is_killed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving_anew(tiny_checkpoint, tmp_path, "--standby") as service:
        family = service.children
        assert service.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_until(lambda: not alive(family), what="the orphans to end")


def refused_start(checkpoint: Path, *flags: str, port: int | None = None) -> tuple[int, str]:
    """Return the exit code and stderr of a service that does not start, at log level warning."""
    done = subprocess.run(
        command(checkpoint, free_port() if port is None else port, "--log-level", "warning", *flags),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        env=clean_environment(),
        check=False,
    )
    return done.returncode, done.stderr


def damage_missing(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def damage_truncated(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_hash(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_shape(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "mlp_size": config["mlp_size"] + 1}))


def damage_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")


def damage_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.tiktoken").unlink()


def damage_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


DAMAGES = [
    damage_missing,
    damage_truncated,
    damage_hash,
    damage_shape,
    damage_config,
    damage_tokenizer,
    damage_manifest,
]


@pytest.fixture
def copied_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny_checkpoint.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_a_one_line_error(
    copied_checkpoint: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copied_checkpoint)
    assert main(["serve", "--checkpoint", str(copied_checkpoint), "--port", str(free_port())]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvasir serve: {copied_checkpoint}")
    assert "SHA-256 differs" in error or damage is not damage_hash
    assert error.count("\n") == 1


def test_a_service_with_non_finite_weights_does_not_start(copied_checkpoint: Path) -> None:
    path = copied_checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = read_headers(path)["layers.1.mlp.down.weight"]
    data[header.begin : header.begin + 4] = struct.pack("<f", math.nan)
    path.write_bytes(data)
    write_manifest(copied_checkpoint, name="tiny", training={"steps": 0})
    code, error = refused_start(copied_checkpoint)
    assert code == 1
    assert error.startswith(f"kvasir serve: {path}: tensor layers.1.mlp.down.weight holds NaN or infinity; copy ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--kv-cache-memory", "1"),
            "--kv-cache-memory 1.0MiB holds 4096 tokens, less than the context of 8192 tokens",
        ),
        (("--device", "cpu", "--quantize", "fp8"), "--quantize fp8 works only on a GPU; choose --quantize int8"),
    ],
)
def test_a_setting_that_the_worker_rejects_is_a_one_line_error(
    long_checkpoint: Path, flags: tuple[str, ...], said: str
) -> None:
    code, error = refused_start(long_checkpoint, *flags)
    assert error.startswith(f"kvasir serve: {said}")
    assert error.count("\n") == 1
    assert code == 2


def test_a_port_in_use_is_a_one_line_error(tiny_checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, error = refused_start(tiny_checkpoint, port=port)
    assert (code, error) == (1, f"kvasir serve: port {port} on 127.0.0.1 is in use; choose another with --port\n")


def test_a_signal_during_the_start_ends_the_service_with_exit_code_0(tiny_checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command(tiny_checkpoint, free_port()), stdout=subprocess.DEVNULL, stderr=stderr, env=clean_environment()
        )
    family = [psutil.Process(process.pid)]
    try:
        wait_until(lambda: family[0].name() == "kvasir-main", seconds=START_SECONDS, what="the worker to be launched")
        family += family[0].children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 0
        wait_until(lambda: not alive(family), what="every process to end")
    finally:
        for member in alive(family):
            member.kill()
        process.wait(PATIENCE_SECONDS)
    assert "Traceback" not in log.read_text()
