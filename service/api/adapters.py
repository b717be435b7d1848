"""Handlers of vLLM's routes `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

import asyncio
import os
import time
from pathlib import Path

from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from model.checkpoint.lora_adapter import Adapter, read_adapter
from model.io.files import CheckpointError, error_line
from model.system.limits import available_memory_bytes
from service.api.context import ApiContext
from service.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from service.protocol.errors import InvalidRequest, ModelNotFound, RouteDisabled
from service.requests.adapters import ServedAdapter, loading_bytes


class Adapters:
    """Handlers that load and unload LoRA adapters while the service runs, from the directories in --lora-dir."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._loading = asyncio.Lock()  # loading takes much memory

    async def load(self, request: Request) -> Response:
        """Handle `POST /v1/load_lora_adapter`: check an adapter's files. From the response on, requests can name it.

        The worker reads the files again. If that fails, the requests that name the adapter fail.
        """
        asked = LoadAdapterRequest.parse(await self._context.read_body(request))
        directory = self._resolve(asked.lora_path)
        async with self._loading:
            self._check_name(asked.lora_name)
            adapter = await asyncio.to_thread(self._read, directory)
            self._check_name(asked.lora_name)
            self._context.engine_client.load_adapter(
                ServedAdapter(
                    name=asked.lora_name,
                    directory=str(directory),
                    key=adapter.key,
                    created_seconds=int(time.time()),
                    num_bytes=adapter.num_bytes,
                )
            )
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Handle `POST /v1/unload_lora_adapter`. Unfinished requests that use the adapter continue.

        Raises ModelNotFound if no adapter has the name.
        """
        asked = UnloadAdapterRequest.parse(await self._context.read_body(request))
        self._root()
        if self._context.adapters.find(asked.lora_name) is None:
            raise ModelNotFound(f"the adapter {asked.lora_name[:100]!r} is not loaded", param="lora_name")
        self._context.engine_client.unload_adapter(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    def _root(self) -> Path:
        if (root := self._context.settings.lora_dir) is None:
            raise RouteDisabled("adapters cannot be loaded or unloaded on this server; start it with --lora-dir DIR")
        return root.resolve()

    def _resolve(self, path: str) -> Path:
        """Return the directory at a path from a request. A relative path begins at --lora-dir.

        Raises InvalidRequest if the directory, after symbolic links, is not below --lora-dir.
        """
        root = self._root()
        try:
            directory = Path(os.path.realpath(root / path))
        except (OSError, ValueError):
            directory = root
        if root not in directory.parents:
            raise InvalidRequest.of("lora_path", f": {path[:200]!r} is not below --lora-dir")
        return directory

    def _check_name(self, name: str) -> None:
        processor = self._context.processor
        if name in (processor.model_name, *processor.aliases):
            raise InvalidRequest.of("lora_name", f": {name!r} is a name of the base model; choose another")
        if self._context.adapters.find(name) is not None:
            raise InvalidRequest.of("lora_name", f": {name!r} is loaded already; unload it first")

    def _read(self, directory: Path) -> Adapter:
        try:
            adapter = read_adapter(directory, self._context.served.manifest)
        except CheckpointError as error:
            # The client sees the path below --lora-dir, not that of the server.
            message = error_line(str(error).replace(f"{self._root()}/", ""))
            raise InvalidRequest(message, param="lora_path") from None
        needed = len(self._context.workers) * loading_bytes([adapter.num_bytes])
        free = available_memory_bytes()
        if needed > free:
            raise InvalidRequest.of(
                "lora_path",
                f": this adapter needs {needed >> 20} MiB of memory to load, but {free >> 20} MiB are free; "
                "free memory, or unload another adapter",
            )
        return adapter
