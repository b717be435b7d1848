"""Kvasir as an engine of NVIDIA Dynamo: each worker runs `kvasir serve`, and Dynamo's frontend tokenizes and routes.

    python kvasir_engine.py runs/kvasir-hf --threads 1

The checkpoint is a Hugging Face directory, whose tokenizer the frontend reads. Further arguments are flags of
`kvasir serve`. docs/scale.md describes setup and limits.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import aiohttp
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run

# Fields of Dynamo's requests that are fields of /v1/completions. The frontend finds stop strings itself.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_LENGTH = ("max_tokens", "min_tokens", "ignore_eos")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class KvasirEngine(LLMEngine):
    """Engine of one worker: a service as a child process, which ends with this process."""

    def __init__(self, checkpoint: str, flags: Sequence[str]) -> None:
        self._checkpoint, self._flags = checkpoint, flags
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._events = f"tcp://127.0.0.1:{_free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._context_length = 0

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["KvasirEngine", WorkerConfig]:
        """Return the engine that the command line describes, and where Dynamo finds it, from Dynamo's variables."""
        parser = argparse.ArgumentParser()
        parser.add_argument("checkpoint")
        arguments, flags = parser.parse_known_args(argv)
        config = WorkerConfig(
            namespace=os.environ.get("DYN_NAMESPACE", "dynamo"),
            component="kvasir",
            endpoint="generate",
            model_name=arguments.checkpoint,
            served_model_name=os.path.basename(os.path.normpath(arguments.checkpoint)),
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
        )
        return cls(arguments.checkpoint, flags), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the service, and wait until it is ready. Raises `RuntimeError` if it ends."""
        own = ("--checkpoint", self._checkpoint, "--port", self._url.rpartition(":")[2])
        command = ("setpriv", "--pdeathsig", "TERM", "kvasir", "serve", *own, "--kv-events-endpoint", self._events)
        self._process = subprocess.Popen([*command, *self._flags])
        self._session = aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(total=None))
        while not await self._is_ready(self._session):
            if self._process.poll() is not None:
                raise RuntimeError(f"kvasir serve ended with exit code {self._process.returncode}")
            await asyncio.sleep(0.1)
        async with self._session.get("/v1/models") as response:
            self._context_length = (await response.json())["data"][0]["max_model_len"]
        registration = LlmRegistration(context_length=self._context_length, kv_cache_block_size=16)
        return EngineConfig(model=self._checkpoint, llm=registration)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get("/ready") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the tokens of a completion as they arrive. A cancelled request closes its connection to the service."""
        assert self._session is not None
        options = {**request.get("sampling_options", {}), **request.get("stop_conditions", {})}
        given = {name: options.get(name) for name in (*_SAMPLING, *_PENALTIES, *_LENGTH)}
        body = {name: value for name, value in given.items() if value is not None}
        prompt = list(request["token_ids"])
        body = {"max_tokens": self._context_length - len(prompt), **body, "prompt": prompt}
        body |= {"stream": True, "return_token_ids": True}
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                if context.is_stopped():
                    yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                    return
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    for choice in event["choices"]:
                        yield self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {"token_ids": choice.get("token_ids") or [], "index": 0}
        return chunk if choice["finish_reason"] is None else {**chunk, "finish_reason": choice["finish_reason"]}

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Let Dynamo's router read the service's KV-cache events."""
        return [ZmqSource(endpoint=self._events)]

    async def cleanup(self) -> None:
        """End the service, which drains. Safe to call again."""
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)


if __name__ == "__main__":
    run(KvasirEngine)
