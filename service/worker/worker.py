"""Worker process: LitAPI builds the engine, and LitLoop runs it in one thread.

The engine loop reads commands from the channel before each step, and waits there while there is no work. The loop puts
the events of each step into an outbox, from which a carrier thread sends them to the API process.
"""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from litserve import LitAPI
from litserve.loops import LitLoop
from litserve.specs.base import LitSpec

from model.checkpoint.manifest import Manifest
from service.config import log_setup
from service.config.settings import ServeSettings, SettingsError, effective_values
from service.ipc.channel import Channel
from service.ipc.messages import API_PATH, Command, Event, WorkerReady, decode_commands, encode_events
from service.ipc.shared_state import Lifecycle, Phase, name_process
from service.worker.checkpoint_guard import check_unchanged, stamps_of
from service.worker.engine_loop import EngineLoop
from service.worker.memory_plan import ServerNeeds
from service.worker.standby import wait_for_word

if TYPE_CHECKING:
    from service.engine.engine import Engine
    from service.worker.engine_factory import EngineFacts

logger = logging.getLogger(__name__)

# Exit codes of a worker that cannot start and has printed the reason, so that main prints nothing more. The second code
# means that a setting cannot be used.
EXIT_START_FAILED, EXIT_SETTINGS = 3, 4
# Text of torch's error for exhausted CPU memory, which is a plain RuntimeError.
_CPU_MEMORY = "can't allocate memory"
# Tokens of the warm-up step on a CPU. A longer step takes seconds with a large model and has no further use.
_CPU_WARM_UP_TOKENS = 16
# Minimum interval of messages to the API process, because each message wakes its event loop.
_MESSAGE_SECONDS = 0.0005


class EngineAPI(LitAPI):  # type: ignore[misc]  # litserve has no types
    """Object that LitServe pickles to the worker process and calls there to build the engine.

    Args:
        found: resolved values of settings that main knows, by name.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        manifest: Manifest,
        found: Mapping[str, object],
        lifecycle: Lifecycle,
        loop: "EngineLoop",
        spec: LitSpec,
    ) -> None:
        super().__init__(loop=loop, spec=spec, api_path=API_PATH)
        self.settings = settings
        self.manifest = manifest
        self.stamps = stamps_of(manifest.weight_files)
        self.found = found
        self.lifecycle = lifecycle
        self.word: Connection | None = None  # of a standby worker: the connection it waits on

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for a worker: everything but the spec (routes), which stays in the API process."""
        return {**self.__dict__, "_spec": None}

    async def authorize(self) -> None:
        """Allow every request.

        This replaces LitServe's dependency, which is not async and so costs each request a thread.
        """

    def setup(self, device: str) -> None:
        """Build the engine, or print in one line why that failed and end the process.

        LitServe's `device` is ignored in favour of the settings' device.
        """
        log_setup.configure(self.settings.log_level)
        self.lifecycle.die_with_main()
        _obey_only_main(self.lifecycle)
        if self.word is not None:
            name_process("kvasir-standby")
            wait_for_word(self.word)
        name_process("kvasir-worker")
        try:
            # Not at the top: main imports this module too, and the API process is forked from main. Importing torch
            # there would cost 2 s and 217 MiB.
            import torch
        except (ImportError, MemoryError, OSError) as error:  # a library that cannot be mapped is an ImportError
            _end_start(error, is_memory=True)
        self.started_seconds = self.lifecycle.epoch_seconds.value
        try:
            check_unchanged(self.stamps)
            self.engine, self.facts = self.build()
            if self.lifecycle.epoch.value == 0:  # print the settings once, when all values are resolved
                found = {**self.found, **self.facts.found()}
                with suppress(OSError):  # a full disk behind stdout
                    print("\n".join(effective_values(self.settings, found)), flush=True)
        except (ValueError, RuntimeError, MemoryError, OSError) as error:
            is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_MEMORY in str(error)
            _end_start(error, is_memory=is_memory)

    def build(self) -> "tuple[Engine, EngineFacts]":
        """Return a warmed-up engine and its resolved settings. Raises what `engine_factory.build_engine` raises."""
        from service.worker.engine_factory import build_engine

        lifecycle = self.lifecycle
        server = ServerNeeds(standby=self.settings.standby, num_blocks=lifecycle.num_blocks.value)
        engine, facts = build_engine(self.settings, self.manifest, server=server)
        if not lifecycle.num_blocks.value:
            lifecycle.num_blocks.value = facts.num_blocks
            lifecycle.has_standby_memory.value = facts.has_standby
        engine.warm_up(_CPU_WARM_UP_TOKENS if facts.device == "cpu" else None)
        return engine, facts


class WorkerLoop(LitLoop):  # type: ignore[misc]
    """Engine loop of the worker. LitServe calls it once, after `EngineAPI.setup`."""

    def __call__(
        self,
        lit_api: EngineAPI,
        device: str,
        worker_id: int,
        request_queue: None,
        transport: Channel,
        workers_setup_status: dict[str, str],
        callback_runner: Any,
    ) -> NoReturn:
        """Serve until the process ends."""
        outbox: SimpleQueue[list[Event]] = SimpleQueue()
        threading.Thread(target=_carry, args=(outbox, transport), name="carrier", daemon=True).start()
        lifecycle = lit_api.lifecycle
        facts = lit_api.facts
        hello = WorkerReady(
            worker_id=worker_id,
            epoch=lifecycle.epoch.value,
            device=facts.device,
            dtype=facts.dtype,
            attention=facts.attention,
            kernel_level=facts.kernel_level,
            matrices=facts.matrices,
            kv_cache_dtype=facts.kv_cache_dtype,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            startup_seconds=time.monotonic() - lit_api.started_seconds,
        )
        logger.info("%s, ready after %.1f s", facts, hello.startup_seconds)
        _send(transport, [hello])
        lifecycle.ready_epoch.value = hello.epoch

        def receive(timeout_seconds: float) -> list[Command] | None:
            if (message := transport.receive(timeout_seconds)) is None:
                return None
            batch = decode_commands(message)
            return batch.commands if batch.epoch == hello.epoch else []

        def beat() -> None:
            lifecycle.beat()
            lifecycle.end_if_orphaned()

        engine_loop = EngineLoop(
            lit_api.engine,
            receive=receive,
            send=outbox.put,
            send_now=lambda events: _send(transport, events),
            beat=beat,
        )
        gc.collect()
        gc.freeze()  # long-lived objects: scanning them in later collections would delay every stream
        while True:
            engine_loop.run_once()


def _carry(outbox: SimpleQueue[list[Event]], transport: Channel) -> NoReturn:
    """Send events to the API process while the next step computes. Sending blocks while the API process is behind.

    Events that arrive between two messages are sent together, since a step may be shorter than the cost of a message.
    """
    while True:
        events = gathered(outbox)
        next_seconds = time.monotonic() + _MESSAGE_SECONDS
        _send(transport, events)
        time.sleep(max(0.0, next_seconds - time.monotonic()))


def _send(transport: Channel, events: list[Event]) -> None:
    try:
        transport.send(encode_events(events))
    except OSError:  # the channel is closed; main ends the service
        os._exit(1)


def _end_start(error: Exception, *, is_memory: bool) -> NoReturn:
    """Print in one line why the engine cannot be built, and end this process.

    The process ends without the interpreter's finalization, which would abort it while a thread is inside torch.
    """
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    first_line = first_line[max(0, first_line.find(_CPU_MEMORY)) :]  # skip torch's source file and line number
    advice = "; lower --kv-cache-memory or --max-context-length, or use a smaller model" if is_memory else ""
    with suppress(OSError):  # stderr may be closed
        print(f"kvasir serve: {first_line}{advice}", file=sys.stderr, flush=True)
    os._exit(EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_START_FAILED)


def gathered(outbox: SimpleQueue[list[Event]]) -> list[Event]:
    """Return all events of the outbox, in order. Block until there is an event."""
    events = list(outbox.get())
    with suppress(Empty):
        while True:
            events.extend(outbox.get_nowait())
    return events


def _obey_only_main(lifecycle: Lifecycle) -> None:
    """Ignore SIGINT, and SIGTERM until main is stopping.

    Terminals and systemd signal every process, but the worker must run on while main drains.
    """

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if lifecycle.phase.value == Phase.STOPPING:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
