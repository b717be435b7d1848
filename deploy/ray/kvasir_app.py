"""Kvasir on Ray Serve: each replica runs `kvasir serve`, and Ray's prefix-affinity router chooses the replica.

    serve run kvasir_app:build replicas=2 flags="--checkpoint checkpoints/kvasir-20m"

The routes are Kvasir's own, and so are the responses. docs/scale.md describes setup and limits.
"""

import json
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

# The public name, ray.serve.llm.request_router, needs vLLM or SGLang.
_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
_ATTEMPTS = 3
_DROPPED_HEADERS = {"host", "connection", "content-length", "transfer-encoding"}
_api = FastAPI(openapi_url=None)


@dataclass
class Forwarded:
    """Request of a client, as a replica sends it to its service. The router reads `prompt`."""

    prompt: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def prompt_of(path: str, body: bytes) -> str:
    """Return the text by which the router compares requests: of the messages or the prompt; else the path."""
    if not path.startswith("/v1/"):  # the text of /tokenize is in no prefix cache
        return path
    try:
        asked = json.loads(body)
        parts = asked.get("messages") or asked.get("prompt") or asked.get("input") or path
        if isinstance(parts, str):
            return parts
        contents = (part.get("content") if isinstance(part, dict) else part for part in parts)
        return "".join(each if isinstance(each, str) else json.dumps(each) for each in contents)
    except (ValueError, AttributeError, TypeError):
        return path


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers to forward: those that do not belong to one connection."""
    return {name: value for name, value in headers.items() if name.lower() not in _DROPPED_HEADERS}


@serve.deployment(
    max_ongoing_requests=256,
    graceful_shutdown_timeout_s=40,  # longer than the drain of the service
    health_check_period_s=2,
    health_check_timeout_s=10,
    request_router_config=RequestRouterConfig(
        request_router_class=_ROUTER, request_router_kwargs={"imbalanced_threshold": 8, "do_eviction": True}
    ),
)
class Replica:
    """Replica: a service as a child process, which ends with this process."""

    def __init__(self, flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = ["setpriv", "--pdeathsig", "TERM", "kvasir", "serve", "--port", str(port), *shlex.split(flags)]
        self._process = subprocess.Popen(command)
        while not self._is_ready():
            time.sleep(0.1)
        self._session: aiohttp.ClientSession | None = None

    def _is_ready(self) -> bool:
        """Return True if the service is ready. Raises `RuntimeError` if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"kvasir serve ended with exit code {self._process.returncode}")
        try:
            with urllib.request.urlopen(f"{self._url}/ready", timeout=5):
                return True
        except OSError:
            return False

    def check_health(self) -> None:
        """Raise an error if the service has ended. It replaces a dead or hanging worker by itself."""
        self._is_ready()

    async def forward(self, request: Forwarded) -> AsyncIterator[Any]:
        """Yield status and headers of the service's response, and then its body as it arrives."""
        if self._session is None:
            self._session = aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(total=None))
        asked = self._session.request(request.method, request.path, headers=request.headers, data=request.body)
        async with asked as response:
            yield response.status, kept(response.headers)
            async for chunk in response.content.iter_any():
                yield chunk


@serve.deployment(max_ongoing_requests=1024)
@serve.ingress(_api)
class Ingress:
    """Entrance: forwards each request to a replica, and to another one if the replica dies before it responds."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    @_api.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
    async def forward(self, request: Request) -> StreamingResponse:
        """Forward a request. Raises the error of the last attempt, which Serve answers with a 500."""
        body, target = await request.body(), request.url.path
        path = f"{target}?{request.url.query}" if request.url.query else target
        forwarded = Forwarded(prompt_of(target, body), request.method, path, kept(request.headers), body)
        for attempt in range(1, _ATTEMPTS + 1):
            parts = self._replicas.forward.remote(forwarded)
            try:
                status, headers = await anext(parts)
                break
            except RayError:
                if attempt == _ATTEMPTS:
                    raise
        return StreamingResponse(parts, status, headers)


def build(arguments: dict[str, Any]) -> Application:
    """Return the application. Arguments: `replicas`, their number, and `flags`, the settings of `kvasir serve`."""
    replicas = Replica.options(num_replicas=int(arguments.get("replicas", 2)))
    return Ingress.bind(replicas.bind(arguments.get("flags", "")))
