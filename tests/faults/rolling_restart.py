"""A rolling restart behind nginx, under load: two instances are replaced in turn, and no request fails.

    python -m tests.faults.rolling_restart [--rounds 2] [--clients 8]

Needs nginx. Prints one line of JSON. The exit code is 0 if every response was correct, else 1.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.process import START_SECONDS, clean_environment, command, free_port, wait_until
from tests.tiny_model import save_tiny_checkpoint

# As in docs/operations.md, but for ports and paths.
_NGINX = """
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/nginx.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream kvasir {{
        server 127.0.0.1:{first} max_fails=1 fail_timeout=1s;
        server 127.0.0.1:{second} max_fails=1 fail_timeout=1s;
        keepalive 32;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://kvasir;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 300s;
            proxy_next_upstream error timeout http_503 non_idempotent;
            proxy_next_upstream_tries 2;
        }}
    }}
}}
"""
_BODY = {"prompt": "once", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
# Between two restarts: longer than nginx' `fail_timeout`.
_SETTLE_SECONDS = 2.0


class Instance:
    """Instance of `kvasir serve` behind nginx."""

    def __init__(self, checkpoint: Path, port: int) -> None:
        self._command = command(checkpoint, port)
        self._url = f"http://127.0.0.1:{port}/ready"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the instance and wait until it is ready."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean_environment()
        )
        wait_until(self._is_ready, seconds=START_SECONDS, what="an instance")

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self._url, timeout=5).status_code == 200
        return False

    def drain(self) -> int:
        """Drain the instance by SIGTERM, and return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60)


class Client(threading.Thread):
    """Client thread that repeats one request. `endings` counts the outcomes."""

    def __init__(self, url: str, expected: str, is_over: threading.Event, *, streams: bool) -> None:
        super().__init__(daemon=True)
        self._url, self._expected, self._is_over, self._streams = url, expected, is_over, streams
        self.endings: Counter[str] = Counter()

    def run(self) -> None:
        """Send requests until `is_over` is set."""
        with httpx.Client(timeout=120) as client:
            while not self._is_over.is_set():
                try:
                    self.endings[self._ask(client)] += 1
                except httpx.HTTPError as error:
                    self.endings[type(error).__name__] += 1

    def _ask(self, client: httpx.Client) -> str:
        response = client.post(self._url, json={**_BODY, "stream": self._streams})
        if response.status_code != 200:
            return str(response.status_code)
        if not self._streams:
            return "right" if response.json()["choices"][0]["text"] == self._expected else "wrong text"
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        if data[-1] != "[DONE]":
            return "cut off"
        text = "".join(choice["text"] for event in data[:-1] for choice in json.loads(event)["choices"])
        return "right" if text == self._expected else "wrong text"


@contextlib.contextmanager
def proxied(checkpoint: Path, directory: Path) -> Iterator[tuple[list[Instance], str]]:
    """Start two instances and nginx before them. Yield the instances and the URL of nginx."""
    first, second, port = free_port(), free_port(), free_port()
    instances = [Instance(checkpoint, first), Instance(checkpoint, second)]
    for instance in instances:
        instance.start()
    config = directory / "nginx.conf"
    config.write_text(_NGINX.format(directory=directory, first=first, second=second, port=port))
    nginx = subprocess.Popen(["nginx", "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        yield instances, f"http://127.0.0.1:{port}/v1/completions"
    finally:
        nginx.terminate()
        nginx.wait(10)
        for instance in instances:
            instance.drain()


def roll(directory: Path, *, rounds: int, num_clients: int) -> tuple[Counter[str], list[int]]:
    """Restart each instance `rounds` times under load. Return the outcomes of requests, and the exit codes."""
    checkpoint = save_tiny_checkpoint(directory / "tiny", max_context_length=8192)
    with proxied(checkpoint, directory) as (instances, url):
        wait_until(lambda: _answers(url), what="nginx")
        expected = httpx.post(url, json=_BODY, timeout=60).json()["choices"][0]["text"]
        over = threading.Event()
        clients = [Client(url, expected, over, streams=number % 2 == 0) for number in range(num_clients)]
        for client in clients:
            client.start()
        codes = []
        for _ in range(rounds):
            for instance in instances:
                time.sleep(_SETTLE_SECONDS)
                codes.append(instance.drain())
                instance.start()
        over.set()
        for client in clients:
            client.join(120)
    endings: Counter[str] = Counter()
    for client in clients:
        endings += client.endings
    return endings, codes


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.post(url, json=_BODY, timeout=60).status_code == 200
    return False


def main() -> int:
    """Run the restarts, print outcomes and exit codes as JSON, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.rolling_restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="number of restarts of each instance")
    parser.add_argument("--clients", type=int, default=8, metavar="N")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        endings, codes = roll(Path(directory), rounds=arguments.rounds, num_clients=arguments.clients)
    print(json.dumps({"endings": dict(endings), "exit_codes": codes}))
    return 0 if set(endings) == {"right"} and not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
