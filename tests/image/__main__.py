"""`python -m tests.image`: build the image with Docker or Podman, run it by deploy/docker-run.sh, and check it.

Variables: ENGINE (docker or podman), BASE_IMAGE, BUILD_OPTIONS (further options of `build`), and REQUIRE=1, which makes
a missing engine an error instead of a skipped test.
"""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMAGE, CONTAINER = "kvasir:cpu", "kvasir-test"
with ExitStack() as stack:
    LISTENERS = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]  # on free ports
    PORT, PROMETHEUS, ALERTMANAGER, GRAFANA = (listener.getsockname()[1] for listener in LISTENERS)
Process = subprocess.Popen[bytes]
PROMPT = {"prompt": "Once upon a time", "max_tokens": 800, "seed": 7, "stream": True, "ignore_eos": True}
# Waits for a line, so that the signal arrives in the middle of a stream however long `exec` takes to start.
KILL_WORKER = (
    "import os, pathlib; print(flush=True); input(); "
    "[os.kill(int(path.parent.name), 9) for path in pathlib.Path('/proc').glob('[0-9]*/comm') "
    "if path.read_text() == 'kvasir-worker\\n']"
)


# Requests to the monitoring services of compose, and regular expressions for the responses.
MONITORED = (
    (PROMETHEUS, "/api/v1/targets?state=active", '"health":"up"'),
    (PROMETHEUS, "/api/v1/rules", '^(?!.*"health":"(err|unknown)").*"name":"KvasirDown"'),
    (PROMETHEUS, "/api/v1/alertmanagers", '"activeAlertmanagers":.*"http://alertmanager:9093'),
    (ALERTMANAGER, "/api/v2/status", '"original":".*severity'),
    (GRAFANA, "/api/search?type=dash-db", '^(?=.*"uid":"kvasir").*"uid":"kvasir-fleet"'),
    (GRAFANA, "/api/datasources/proxy/uid/prometheus/api/v1/query?query=up", '"job":"kvasir"'),
)


class SkippedError(Exception):
    """The image cannot be tested on this machine."""


def report(name: str, figure: object) -> None:
    print(f"  {name:<20} {figure}", flush=True)


def attempt(*command: str) -> tuple[bool, str]:
    """Run a command. Return whether it succeeded, with its output or the last line of its errors."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True, done.stdout.strip()
    return False, (done.stderr.strip().splitlines() or ["no message"])[-1]


def output(*command: str) -> str:
    succeeded, text = attempt(*command)
    assert succeeded, f"{shlex.join(command)}: {text}"
    return text


def seconds_until(condition: Callable[[], bool], limit: float, what: str) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit, f"not {what} after {limit:.0f} s"
        time.sleep(0.05)
    return time.monotonic() - began


def has_standby() -> bool:
    """Return True if a standby worker has completed its imports, and so has its name."""
    return 'process="kvasir-standby"' in request("/metrics").read().decode()


def find_engine() -> str:
    """Return the first engine that answers."""
    reasons = []
    for name in os.environ.get("ENGINE", "docker podman").split():
        answers, reason = attempt(name, "info") if shutil.which(name) else (False, "not installed")
        if answers:
            return name
        reasons.append(f"{name}: {reason}")
    raise SkippedError("; ".join(reasons))


def find_base_image(engine: str) -> str:
    base = os.environ.get("BASE_IMAGE") or re.findall(r"\nARG BASE_IMAGE=(\S+)", (ROOT / "Dockerfile").read_text())[0]
    if reason := pull(engine, base):
        raise SkippedError(reason)
    return base


def pull(engine: str, image: str) -> str:
    """Pull an image that is not on this machine. Return the reason if that fails."""
    if attempt(engine, "image", "inspect", image)[0]:
        return ""
    pulled, reason = attempt(engine, "pull", image)
    return "" if pulled else f"{engine} cannot pull {image}: {reason}"


def build(engine: str, base: str) -> None:
    arguments = [f"BASE_IMAGE={base}", f"REVISION={output('git', 'rev-parse', 'HEAD')}", f"SOURCE={ROOT.as_uri()}"]
    arguments.append(f"CREATED={datetime.now(UTC).isoformat(timespec='seconds')}")
    options = [word for argument in arguments for word in ("--build-arg", argument)]
    options += ["--format", "docker"] if engine == "podman" else []  # for HEALTHCHECK
    options += shlex.split(os.environ.get("BUILD_OPTIONS", ""))
    command = [engine, "build", "--target", "service", "--tag", IMAGE, *options, str(ROOT)]
    began = time.monotonic()
    with started(command, {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}) as process:
        assert process.wait() == 0, "the build failed"
    report("build", f"{time.monotonic() - began:.0f} s")


@contextmanager
def started(command: Sequence[str], extra: Mapping[str, str]) -> Iterator[Process]:
    """Start a command; print the end of its output if a check fails."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | extra, stdout=log, stderr=log, process_group=0)
        try:
            yield process
        except (AssertionError, subprocess.TimeoutExpired):
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise


def request(path: str, body: dict[str, Any] | None = None, port: int = PORT) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
    return connection.getresponse()


def is_ready(process: Process) -> bool:
    assert process.poll() is None, f"{process.args!r} ended before the service was ready"
    try:
        return request("/ready").status == 200
    except (OSError, http.client.HTTPException):
        return False


def is_answered(port: int, path: str, pattern: str) -> bool:
    try:
        return re.search(pattern, request(path, port=port).read().decode(), re.DOTALL) is not None
    except (OSError, http.client.HTTPException):
        return False


def is_healthy(engine: str) -> bool:
    if engine == "podman":
        attempt(engine, "healthcheck", "run", CONTAINER)  # without systemd nothing else runs it
    return output(engine, "inspect", "--format", "{{.State.Health.Status}}", CONTAINER) == "healthy"


def stream(act: Callable[[], object] = lambda: None) -> tuple[str, float]:
    """Stream a completion, and act after 20 chunks. Return the text and the longest time between two chunks."""
    texts, gap, before = list[str](), 0.0, time.monotonic()
    for line in request("/v1/completions", PROMPT):
        if line == b"data: [DONE]\n":
            return "".join(texts), gap
        if line.startswith(b"data: "):
            gap, before = max(gap, time.monotonic() - before), time.monotonic()
            texts.append(json.loads(line[6:])["choices"][0]["text"])
            if len(texts) == 20:
                act()
    raise AssertionError(f"a stream ended after {len(texts)} chunks, without [DONE]")


def check_metadata(engine: str) -> None:
    (image,) = json.loads(output(engine, "image", "inspect", IMAGE))
    report("size", f"{image['Size'] / 1e6:.0f} MB")
    assert image["Config"]["User"] == "10001:10001", f"the image's user is {image['Config']['User']!r}"
    labels = {name.rpartition(".")[2]: value for name, value in image["Config"]["Labels"].items()}
    assert all(labels[name] for name in ("title", "version", "revision", "source", "licenses", "created")), labels
    report("labels", f"version {labels['version']}, revision {labels['revision'][:12]}")


def check_inside(engine: str) -> None:
    """Check what a process in the container may do, and the SBOM."""
    code = "id -u; touch /x 2>/dev/null && echo writable || echo read-only; grep CapEff /proc/1/status"
    user, root, capabilities = output(engine, "exec", CONTAINER, "sh", "-c", code).splitlines()
    found = (user, root, int(capabilities.split()[1], 16))
    assert found == ("10001", "read-only", 0), f"user, root file system and capabilities are {found}"
    report("protections", "uid 10001, read-only root file system, no capabilities")
    sbom = json.loads(output(engine, "exec", CONTAINER, "cat", "/opt/kvasir/sbom.cdx.json"))
    names = {component["name"]: component["version"] for component in sbom["components"]}
    assert {"torch", "litserve"} <= names.keys(), f"the SBOM lists {names}"
    report("SBOM", f"{len(names)} components, torch {names['torch']}")


def check_service(engine: str) -> None:
    """Check a start, a completion, metrics, the death of the worker and a shutdown."""
    environment = {"ENGINE": engine, "IMAGE": IMAGE, "PUBLISH_PORT": str(PORT)}
    command = ["deploy/docker-run.sh", "checkpoints/kvasir-20m", "--name", CONTAINER]
    with started(command, environment) as process:
        try:
            report("ready after", f"{seconds_until(partial(is_ready, process), 120, 'ready'):.1f} s")
            report("then healthy after", f"{seconds_until(partial(is_healthy, engine), 60, 'healthy'):.1f} s")
            check_inside(engine)
            text, gap = stream()
            report("completion", f"{len(text)} characters, longest gap {gap * 1e3:.0f} ms")
            metrics = request("/metrics").read().decode()
            assert re.search(r"^llm_generation_tokens_total.* 800", metrics, re.MULTILINE), "/metrics counts no tokens"
            report("metrics", f"{len(re.findall('^[a-z]', metrics, re.MULTILINE))} samples")
            seconds_until(has_standby, 60, "ready to replace a worker")
            killing = [engine, "exec", "--interactive", CONTAINER, "python", "-c", KILL_WORKER]
            with subprocess.Popen(killing, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as killer:
                killer.stdout.readline()  # type: ignore[union-attr]
                survived, gap = stream(partial(killer.stdin.write, b"\n"))  # type: ignore[union-attr]
            assert survived == text, "another text after the death of the worker"
            assert re.search(rb'restarts_total\{.*"signal".*\} 1', request("/metrics").read()), "no worker was killed"
            report("worker killed", f"the same text, longest gap {gap:.2f} s")
            began = time.monotonic()
            drained, _ = stream(process.terminate)  # `docker run` passes the signal on
            code = process.wait(60)
            assert (drained, code) == (text, 0), f"SIGTERM: exit code {code}"
            report("SIGTERM", f"the same text, exit code 0 after {time.monotonic() - began:.1f} s")
        finally:
            attempt(engine, "rm", "--force", CONTAINER)


def check_compose(engine: str, base: str) -> None:
    """Run README's commands of compose as they are written."""
    missing = {} if shutil.which("nvidia-smi") else {"--profile gpu": "no GPU"}
    if attempt(engine, "compose", "version")[0]:
        images = output(engine, "compose", "--profile", "monitoring", "config", "--images").split()
        if reasons := [reason for image in images if (reason := pull(engine, image))]:
            missing["--profile monitoring"] = reasons[0]
    else:
        missing["compose"] = "no compose"
    ports = {
        "PUBLISH_PORT": PORT,
        "PROMETHEUS_PORT": PROMETHEUS,
        "ALERTMANAGER_PORT": ALERTMANAGER,
        "GRAFANA_PORT": GRAFANA,
    }
    environment = {name: str(port) for name, port in ports.items()}
    environment |= {"COMPOSE_PROJECT_NAME": CONTAINER, "BASE_IMAGE": base}
    for text in re.findall(r"^\$ docker (compose .*?) *(?:#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE):
        if reasons := [why for option, why in missing.items() if option in text]:
            report("compose", f"skipped ({reasons[0]}): {text}")
            continue
        with started([engine, *text.split()], environment) as process:
            try:
                seconds = seconds_until(partial(is_ready, process), 1200, "ready")
                for question in MONITORED if "monitoring" in text else ():
                    seconds_until(partial(is_answered, *question), 120, f"answered: {question[1]}")
                if " up " in text:
                    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
                assert process.wait(300) in (0, 130), f"exit code {process.returncode} of {text}"
                report("compose", f"ready after {seconds:.0f} s: {text}")
            finally:
                attempt(engine, "compose", "--project-name", CONTAINER, "--profile", "*", "down", "--volumes")


def main() -> int:
    """Run all checks. Return 1 if one fails, or with REQUIRE=1 if the image cannot be tested here."""
    try:
        engine = find_engine()
        base = find_base_image(engine)
        print(f"test-image: {engine} on {base}", flush=True)
        build(engine, base)
        check_metadata(engine)
        check_service(engine)
        check_compose(engine, base)
    except SkippedError as skipped:
        print(f"test-image: SKIPPED, nothing was tested. {skipped}")
        return int(os.environ.get("REQUIRE") == "1")
    except (AssertionError, subprocess.TimeoutExpired) as failed:
        print(f"test-image: FAILED: {failed}", file=sys.stderr)
        return 1
    print("test-image: passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
