"""Command `kvasir batch` against a fake server, and with a server of its own."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from service.cli.batch import BatchLine, BatchOutput
from service.cli.main import main
from service.config.client_settings import BatchSettings
from service.config.settings import ServeSettings
from tests.e2e.process import PATIENCE_SECONDS, alive, clean_environment, wait_until


class FakeServer(ThreadingHTTPServer):
    """HTTP server that responds to a request with its body.

    open_after: number of requests after which further requests wait for `gate`.
    refusals: responses (status, headers) to the first requests.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gate = threading.Event()
        self.gate.set()
        self.open_after = 10**9
        self.refusals: list[tuple[int, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.asked: list[tuple[str, Any, str]] = []
        self.num_running = self.max_running = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client has disconnected."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.asked.append((self.path, body, self.headers["idempotency-key"]))
            server.num_running += 1
            server.max_running = max(server.max_running, server.num_running)
            number = len(server.asked)
            status, headers = server.refusals.pop(0) if server.refusals else (200, {})
        if number > server.open_after:
            server.gate.wait()
        with server.lock:
            server.num_running -= 1
        if status == 0:
            self.connection.close()
            self.close_connection = True
            return
        content = json.dumps({"echo": body}).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), "x-request-id": "r1", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVASIR_")]:
        monkeypatch.delenv(name)


def request_line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": custom_id}})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def run(server: FakeServer, asked: Path, out: Path, *flags: str) -> int:
    return main(["batch", str(asked), str(out), "--url", server.url, *flags])


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "service.cli", "batch", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def test_each_request_gets_one_line_in_openais_format(server: FakeServer, tmp_path: Path) -> None:
    asked = write(tmp_path / "in", *(request_line(f"é{n}") for n in range(20)), "", request_line("e", "/v1/embeddings"))
    assert run(server, asked, tmp_path / "out", "--concurrency", "3") == 0
    lines = {line["custom_id"]: line for line in read(tmp_path / "out")}
    assert set(lines) == {*(f"é{n}" for n in range(20)), "e"}
    assert len({line["id"] for line in lines.values()}) == 21
    for custom_id, line in lines.items():
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        expected = {"status_code": 200, "request_id": "r1", "body": {"echo": {"prompt": custom_id}}}
        assert line["response"] == expected
    assert sorted(Counter(path for path, _, _ in server.asked).items()) == [
        ("/v1/completions", 20),
        ("/v1/embeddings", 1),
    ]
    assert server.max_running <= 3


def test_a_base_url_may_end_in_v1(server: FakeServer, tmp_path: Path) -> None:
    asked = write(tmp_path / "in", request_line("a"))
    assert main(["batch", str(asked), str(tmp_path / "out"), "--url", server.url + "/v1/"]) == 0
    assert server.asked[0][0] == "/v1/completions"


def test_a_corrected_line_no_longer_counts_as_failed(server: FakeServer, tmp_path: Path) -> None:
    asked = write(tmp_path / "in", request_line("a"), "nonsense")
    assert run(server, asked, tmp_path / "out") == 1
    asked = write(tmp_path / "in", request_line("a"), request_line("b"))
    for _ in range(2):
        assert run(server, asked, tmp_path / "out") == 0
    assert [line["custom_id"] for line in read(tmp_path / "out")] in (["a", None, "b"], [None, "a", "b"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "not valid JSON"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ("[]", "not an object with a custom_id"),
        ('{"custom_id": 3}', "not an object with a custom_id"),
        ('{"custom_id": "x", "method": "GET"}', 'method must be "POST"'),
        ('{"custom_id": "x", "method": "POST", "url": "http://a/b", "body": {}}', "url must be the path"),
        ('{"custom_id": "x", "method": "POST", "url": "/a b", "body": {}}', "url must be the path"),
        ('{"custom_id": "x", "method": "POST", "url": "/a", "body": []}', "body must be an object"),
        (request_line("x", stream=True), "body.stream is not possible"),
    ],
)
def test_a_malformed_line_becomes_an_error_line_once(server: FakeServer, tmp_path: Path, text: str, said: str) -> None:
    asked = write(tmp_path / "in", request_line("a"), text)
    for _ in range(2):
        assert run(server, asked, tmp_path / "out") == 1
    error, answered = sorted(read(tmp_path / "out"), key=lambda line: line["custom_id"] == "a")
    assert answered["response"]["status_code"] == 200
    assert error["response"] is None
    assert error["custom_id"] == ("x" if '"x"' in text else None)
    assert error["error"]["line"] == 2
    assert error["error"]["message"].startswith(f"line 2: {said}")
    assert len(server.asked) == 1


class _FullDisk(io.BytesIO):
    name = "out"

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    close = flush  # as of a buffered file, which tries to write again


def test_a_full_disk_is_named_with_the_file() -> None:
    expected = "^out: No space left on device; make room, and run the same command to continue$"
    with pytest.raises(ValueError, match=expected), BatchOutput(_FullDisk(), set()) as output:
        output.write_error(BatchLine(number=1, custom_id="a", error="bad"))


def test_repeated_ids_are_an_error_before_anything_is_sent(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = write(tmp_path / "in", request_line("a"), request_line("b"), request_line("a"))
    assert run(server, asked, tmp_path / "out") == 1
    assert "lines 1 and 3 have the custom_id 'a'; give each line its own" in capsys.readouterr().err
    assert server.asked == []
    assert not (tmp_path / "out").exists()


def test_an_error_response_is_kept_and_fails_the_batch(server: FakeServer, tmp_path: Path) -> None:
    server.refusals = [(400, {})]
    asked = write(tmp_path / "in", request_line("a"), request_line("b"))
    assert run(server, asked, tmp_path / "out", "--concurrency", "1") == 1
    assert [line["response"]["status_code"] for line in read(tmp_path / "out")] == [400, 200]
    assert run(server, asked, tmp_path / "out") == 1, "the earlier failure counts"
    assert len(server.asked) == 2


def test_busy_servers_and_lost_connections_are_tried_again(server: FakeServer, tmp_path: Path) -> None:
    server.refusals = [
        (429, {"retry-after": "0"}),
        (0, {}),
        (500, {"x-should-retry": "true"}),
        (503, {"retry-after": "soon"}),
    ]
    asked = write(tmp_path / "in", request_line("a"))
    assert run(server, asked, tmp_path / "out") == 0
    assert len(server.asked) == 5
    assert len({key for _, _, key in server.asked}) == 1, "a retry has the key of the first attempt"


@pytest.mark.parametrize(("status", "said"), [(429, "is busy: status 429"), (0, "does not respond"), (401, "API key")])
def test_a_batch_stops_without_a_line_for_requests_that_got_no_response(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, said: str
) -> None:
    server.refusals = [(200, {}), *[(status, {})] * 2]
    asked = write(tmp_path / "in", request_line("a"), request_line("b"), request_line("c"))
    assert run(server, asked, tmp_path / "out", "--max-retries", "1", "--concurrency", "1") == 1
    assert said in capsys.readouterr().err
    assert [line["custom_id"] for line in read(tmp_path / "out")] == ["a"]
    server.refusals.clear()
    assert run(server, asked, tmp_path / "out") == 0
    assert sorted(line["custom_id"] for line in read(tmp_path / "out")) == ["a", "b", "c"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_batch_continues_without_loss_or_repetition(
    server: FakeServer, tmp_path: Path, number: int
) -> None:
    """The last line is also cut, as by a full disk."""
    asked, out = write(tmp_path / "in", *(request_line(f"{n}") for n in range(30))), tmp_path / "out"
    server.open_after = 12
    server.gate.clear()
    with start(str(asked), str(out), "--url", server.url, "--concurrency", "4") as process:
        wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") == 12, what="12 lines")
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == (130 if number == signal.SIGINT else -number)
    server.gate.set()
    assert len(read(out)) == 12
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert run(server, asked, out) == 0
    assert sorted(int(line["custom_id"]) for line in read(out)) == list(range(30))
    counts = Counter(body["prompt"] for _, body, _ in server.asked)
    assert max(counts.values()) <= 2
    assert sum(counts.values()) <= 30 + 4 + 1, "only running requests and the cut line are sent again"


@pytest.mark.parametrize("step", range(1, 120, 8))
def test_a_batch_ends_wherever_an_interrupt_finds_it(server: FakeServer, tmp_path: Path, step: int) -> None:
    """SIGINT comes at a chosen line of Python code: a lock held by that line must not stop the end of the batch."""
    asked, out = write(tmp_path / "in", *(request_line(f"{n}") for n in range(30))), tmp_path / "out"
    server.open_after = 12
    server.gate.clear()
    num_steps = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_steps
        if not frame.f_code.co_filename.endswith(("cli/batch.py", "threading.py", "_base.py", "futures/thread.py")):
            return None
        num_steps += len(server.asked) > 4
        if num_steps == step:
            num_steps += 1
            signal.raise_signal(signal.SIGINT)
        return count

    sys.settrace(count)
    try:
        assert run(server, asked, out, "--concurrency", "4") == 130
    finally:
        sys.settrace(None)
    server.gate.set()
    assert run(server, asked, out) == 0
    assert sorted(int(line["custom_id"]) for line in read(out)) == list(range(30))


def test_foreign_files_and_files_in_use_are_left_alone(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out = write(tmp_path / "in", request_line("a")), write(tmp_path / "out", "my notes")
    assert run(server, asked, out) == 1
    assert "line 1: this line was not written by kvasir batch" in capsys.readouterr().err
    assert out.read_text() == "my notes\n"
    assert run(server, asked, asked) == 2
    assert run(server, tmp_path / "missing", out) == 1
    server.open_after = 0
    server.gate.clear()
    out.unlink()
    with start(str(asked), str(out), "--url", server.url) as process:
        wait_until(lambda: len(server.asked) == 1, what="the request")
        assert run(server, asked, out) == 1
        assert "another batch writes to this file" in capsys.readouterr().err
        server.gate.set()
        assert process.wait(PATIENCE_SECONDS) == 0


def test_the_default_concurrency_fits_a_server() -> None:
    assert BatchSettings.model_fields["concurrency"].default == ServeSettings.model_fields["max_num_running"].default


def test_input_and_output_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["batch"]) == 2
    assert "--input is needed" in capsys.readouterr().err
    assert main(["batch", "a", str(tmp_path / "b"), "c"]) == 2
    assert "unrecognized arguments: c" in capsys.readouterr().err
    assert main(["batch", "a", "/dev/full", "--url", "http://x"]) == 2
    assert "/dev/full is not a regular file" in capsys.readouterr().err
    assert main(["batch", "a", str(tmp_path / "b"), "--url", "ftp://x"]) == 2
    assert main(["batch", "a", str(tmp_path / "b"), "--url", "http://x", "--checkpoint", "c"]) == 2
    assert "give either --url" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGKILL])
def test_its_own_server_ends_with_the_batch(tiny_checkpoint: Path, tmp_path: Path, number: int | None) -> None:
    num_lines = 1 if number is None else 2000  # more than are answered before the signal
    lines = [request_line(f"{n}", prompt="once", max_tokens=200, ignore_eos=True) for n in range(num_lines)]
    asked, out = write(tmp_path / "in", *lines), tmp_path / "out"
    family: list[psutil.Process] = []
    with start(str(asked), str(out), "--checkpoint", str(tiny_checkpoint)) as process:
        if number is not None:
            wait_until(lambda: out.exists() and b"\n" in out.read_bytes(), what="a line")
            family = psutil.Process(process.pid).children(recursive=True)
            assert {"kvasir-api", "kvasir-worker"} <= {member.name() for member in family}
            process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == (0 if number is None else 130 if number == signal.SIGINT else -number)
    wait_until(lambda: not alive(family), what="the end of the server")
    if number is not None:
        assert 0 < out.read_bytes().count(b"\n") < len(lines)
    else:
        assert len(read(out)[0]["response"]["body"]["choices"]) == 1


@pytest.mark.slow
def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    asked = write(tmp_path / "in", request_line("a"))
    with start(str(asked), str(tmp_path / "out"), "--checkpoint", str(tmp_path / "missing")) as process:
        _, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "the server did not start: kvasir serve: " in error
