"""Worker process: imports torch, waits for a message from main (its order), builds the engine and runs its loop.

A carrier thread sends the events of a step to the API process while the engine loop computes the next step.
"""

import functools
import gc
import importlib
import importlib.metadata
import logging
import multiprocessing
import os
import pickle
import pkgutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from model.checkpoint.manifest import Manifest
from model.system.c_library import end_with_parent, trim_heap
from model.system.limits import has_nvidia_driver
from model.tokenizer.interface import Tokenizer
from service.config import log_setup
from service.config.log_setup import FIELDS
from service.config.settings import ServeSettings, SettingsError, effective_settings, effective_values
from service.ipc.channel import WorkerChannel
from service.ipc.messages import Command, Event, WorkerReady, decode_commands, encode_events
from service.ipc.shared_state import WorkerState, end_if_orphaned, name_thread
from service.worker.engine_loop import EngineLoop
from service.worker.memory_plan import ServerNeeds

if TYPE_CHECKING:
    from service.engine.engine import Engine
    from service.worker.cache_event_publisher import CacheEventPublisher
    from service.worker.engine_factory import EngineFacts

logger = logging.getLogger(__name__)

# Exit codes of a worker process that cannot start and has printed the reason.
EXIT_START_FAILED, EXIT_SETTINGS, EXIT_CHECKPOINT_CHANGED = 3, 4, 5
# Text of torch's error for exhausted CPU memory, which is a plain RuntimeError.
_CPU_MEMORY = "can't allocate memory"
# Tokens of the warm-up step on a CPU. A longer step takes seconds with a large model and has no further use.
_CPU_WARM_UP_TOKENS = 16
# Minimum interval of messages to the API process, because each message wakes its event loop.
_MESSAGE_SECONDS = 0.0005
# File descriptors of the order, the shared memory, the worker's end of the channel, and a standby's end of its socket.
_MAX_DESCRIPTORS = 4
# Module whose import takes most of the start. It imports torch.
_IMPORT = "service.worker.engine_factory"
# Module that takes a quarter of the time of `import torch`. It computes the shapes of operators in torch.compile and
# torch.export, which a worker without a GPU does not use. Without it there is no torch.Generator either.
_UNUSED_IMPORT = "torch._meta_registrations"
_TESTED_TORCH = "2.13."  # the beginning of the versions that are known to work without this module
# Imported only where it is used, since it needs pyzmq.
_PUBLISHER = "service.worker.cache_event_publisher:CacheEventPublisher"
# Nice value of the standby's importing thread: the lowest priority, so that serving processes get the CPU first.
_NICENESS = 19

# Size in bytes and modification time in nanoseconds of each file.
Stamps: TypeAlias = Mapping[Path, tuple[int, int]]


class CheckpointChanged(ValueError):
    """A checkpoint file has changed, so a new worker would continue streams with different weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrder:
    """Content of the message (order) by which main lets a worker process load this model and serve it."""

    worker_class: str  # "module:class" of the `Worker`
    index: int = 0  # number of the worker, which chooses its device or CPUs
    settings: ServeSettings
    manifest: Manifest
    stamps: Stamps  # of the weight files, when the service started
    adapter_bytes: int  # memory in which the adapters of --lora are loaded
    main_pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedCheckpoint:
    """Content of main's second message to a worker process, which may be loading the model already.

    Main sends the message when it has verified the checkpoint. Until then, a worker process reports no error, because
    main's error may be the cause, and is not ready.
    """

    tokenizer: Tokenizer
    found: Mapping[str, object]  # values that main has chosen for "auto" settings, by name


def main(descriptor: int, parent: int, is_standby: bool) -> NoReturn:
    """Run a worker process: import torch, wait for main's order to serve, fork a standby if main wants one, and serve.

    The process ends with its parent.

    Args:
        descriptor: file descriptor of the socket to main.
        parent: process id of main.
        is_standby: import at low priority, since another worker serves.
    """
    _ignore_signals()
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.set_inheritable(descriptor, False)  # main notices the end of this process by the end of the socket
    if is_standby:
        name_thread("kvasir-importer")
        importing = threading.Thread(target=_import_at_low_priority, name="importing")
        importing.start()
        importing.join()
        name_thread("kvasir-standby")
    else:
        name_thread("kvasir-worker")
        import_engine()
    gc.freeze()
    memory, state, channel, *standby = received = _receive_order(descriptor)
    while standby and _fork_standby(parent):  # true in the standby
        for inherited in (descriptor, *received[:-1]):
            os.close(inherited)
        (descriptor,) = standby
        memory, state, channel, *standby = received = _receive_order(descriptor)
    for inherited in standby:
        os.close(inherited)
    order: WorkerOrder = _read(memory)
    module, _, name = order.worker_class.partition(":")
    make: type[Worker] = getattr(importlib.import_module(module), name)
    make(order, WorkerState(state), WorkerChannel(socket.socket(fileno=channel)), descriptor).run()


def _receive_order(descriptor: int) -> list[int]:
    """Send this process's id to main, wait for main's order to serve, and return the file descriptors in its message.

    They are the file of the pickled `WorkerOrder`, the shared memory, the channel and, only if a standby is wanted, the
    standby's socket to main.
    """
    with suppress(OSError):  # main has closed its end
        os.write(descriptor, str(os.getpid()).encode())
    received = _receive(descriptor)
    shared = WorkerState(os.dup(received[1]))
    shared.begun_epoch.value = shared.epoch.value
    name_thread("kvasir-worker")
    return received


def _receive(descriptor: int) -> list[int]:
    """Wait for main's next message, and return its file descriptors. If main has closed its end, the process exits."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as control:
            _, received, _, _ = socket.recv_fds(control, 1, _MAX_DESCRIPTORS)
    except OSError:
        received = []
    if not received:
        os._exit(0)
    return received


def _read(memory: int) -> Any:
    """Return the object that main has pickled to a memory file."""
    with os.fdopen(memory, "rb") as file:
        file.seek(0)
        return pickle.load(file)


def _fork_standby(main_pid: int) -> bool:
    """Fork a standby worker, which shares the memory of this process's imports. Return True in the standby.

    A process between this process and the standby ends at once, so that main becomes the standby's parent.
    """
    try:
        child = os.fork()
    except OSError:  # main finds the standby's socket closed
        return False
    if child:
        os.waitpid(child, 0)
        return False
    name_thread("kvasir-fork")  # there is one kvasir-worker at a time, and one kvasir-standby
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    os.setpgid(0, 0)
    while os.getppid() == between:
        time.sleep(0.001)
    end_with_parent()
    if os.getppid() != main_pid:
        os._exit(1)
    name_thread("kvasir-standby")
    return True


class Worker:
    """Worker process: builds the engine of its `WorkerOrder`, sends `WorkerReady`, and runs the engine loop.

    control: file descriptor of the socket to main.
    """

    def __init__(self, order: WorkerOrder, state: WorkerState, channel: WorkerChannel, control: int) -> None:
        self.order = order
        self.settings, self.manifest = order.settings, order.manifest
        self.state, self._channel, self._control = state, channel, control

    def run(self) -> NoReturn:
        """Build the engine and serve requests until the process ends."""
        several = f" {self.order.index}" if self.settings.devices > 1 else ""
        multiprocessing.current_process().name = f"worker{several}"  # in log lines
        log_setup.configure(self.settings.log_level, self.settings.log_format)
        started_seconds = self.state.epoch_seconds.value
        engine, facts = self._build_or_exit()
        after_step = self._publish_cache_events(engine) if self.settings.kv_events_endpoint else lambda: None
        ready = WorkerReady(
            epoch=self.state.epoch.value,
            device=facts.device,
            dtype=facts.dtype,
            attention=facts.attention,
            kernel_level=facts.kernel_level,
            kv_cache_dtype=facts.kv_cache_dtype,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            startup_seconds=time.monotonic() - started_seconds,
            fallbacks=facts.fallbacks,
        )
        logger.info("worker ready after %.1f s: %s", ready.startup_seconds, facts)
        self._serve(engine, ready, after_step)

    def _publish_cache_events(self, engine: "Engine") -> Callable[[], None]:
        """Begin to publish the changes of the prefix cache. Return a function that publishes those of one step."""
        settings = self.settings
        assert settings.kv_events_endpoint is not None
        try:
            create: type[CacheEventPublisher] = pkgutil.resolve_name(_PUBLISHER)
            publisher = create(
                settings.kv_events_endpoint,
                replay_endpoint=settings.kv_events_replay_endpoint,
                topic=settings.kv_events_topic or "",
                rank=self.order.index,
            )
        except ImportError:
            install = "--kv-events-endpoint needs pyzmq, which is not installed; run pip install 'kvasir[kv-events]'"
            _end_start(SettingsError(install), is_memory=False)
        except OSError as error:
            _end_start(SettingsError(str(error)), is_memory=False)
        log = engine.log_prefix_cache()
        log.clear()  # what an earlier worker has published is lost
        publisher.publish(log.take())
        return lambda: publisher.publish(log.take())

    def _build_or_exit(self) -> "tuple[Engine, EngineFacts]":
        """Build the engine, or print the reason of a failure in one line and end the process."""
        try:
            import torch  # main imports this module too, and torch takes 2 s and 217 MiB
        except (ImportError, MemoryError, OSError) as error:  # a library that cannot be mapped is an ImportError
            self.wait_until_verified()
            _end_start(error, is_memory=True)
        try:
            check_unchanged(self.order.stamps)
            engine, facts = self.build()
            check_unchanged(self.order.stamps)  # of a file that changed meanwhile, a part may have been loaded
            if self.order.index == self.state.epoch.value == 0:  # print the settings once, when all values are resolved
                self._show_settings({**self.wait_until_verified().found, **facts.setting_values()})
        except (ValueError, RuntimeError, MemoryError, OSError) as error:
            self.wait_until_verified()
            is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_MEMORY in str(error)
            _end_start(error, is_memory=is_memory)
        return engine, facts

    @functools.cache  # noqa: B019 (one worker per process)
    def wait_until_verified(self) -> VerifiedCheckpoint:
        """Wait until main has verified the checkpoint, and return what it has found."""
        verified: VerifiedCheckpoint = _read(*_receive(self._control))
        return verified

    def _show_settings(self, found: Mapping[str, object]) -> None:
        if self.settings.log_format == "json":
            logger.info("settings", extra={FIELDS: {"settings": effective_settings(self.settings, found)}})
            return
        with suppress(OSError):  # a full disk behind stdout
            print("\n".join(effective_values(self.settings, found)), flush=True)

    def build(self) -> "tuple[Engine, EngineFacts]":
        """Return a warmed-up engine and its resolved settings. Raises what `engine_factory.build_engine` raises.

        The first worker stores its number of KV-cache blocks in the shared memory, for all other workers.
        """
        from service.worker.engine_factory import build_engine

        state = self.state
        server = ServerNeeds(
            standby=self.settings.standby,
            num_blocks=state.num_blocks.value,
            adapter_bytes=self.order.adapter_bytes,
            num_workers=self.settings.devices,
            worker_index=self.order.index,
        )
        engine, facts = build_engine(
            self.settings,
            self.manifest,
            server=server,
            get_tokenizer=lambda: self.wait_until_verified().tokenizer,
        )
        if not state.num_blocks.value:
            state.num_blocks.value = facts.num_blocks
            state.has_standby_memory.value = facts.has_standby
        engine.warm_up(_CPU_WARM_UP_TOKENS if facts.device == "cpu" else None)
        return engine, facts

    def _serve(self, engine: "Engine", ready: WorkerReady, after_step: Callable[[], None]) -> NoReturn:
        outbox: SimpleQueue[list[Event]] = SimpleQueue()
        threading.Thread(target=_carry, args=(outbox, self._channel), name="carrier", daemon=True).start()
        _send(self._channel, [ready])
        self.state.ready_epoch.value = ready.epoch

        def receive(timeout_seconds: float) -> list[Command] | None:
            if (message := self._channel.receive(timeout_seconds)) is None:
                return None
            batch = decode_commands(message)
            return batch.commands if batch.epoch == ready.epoch else []

        def beat() -> None:
            self.state.beat()
            end_if_orphaned(self.order.main_pid)

        engine_loop = EngineLoop(
            engine,
            receive=receive,
            send=outbox.put,
            send_now=lambda events: _send(self._channel, events),
            beat=beat,
            after_step=after_step,
        )
        gc.collect()
        trim_heap()  # frees 126 MB with a model of 1.2 GB: mostly parsed JSON of the tokenizer
        gc.freeze()  # long-lived objects: scanning them in later collections would delay every stream
        gc.enable()
        try:
            while True:
                engine_loop.run_once()
        except Exception:
            logger.exception("the engine failed; the worker process ends")
            os._exit(1)  # the interpreter's finalization could wait for a failed CUDA device


def _carry(outbox: SimpleQueue[list[Event]], channel: WorkerChannel) -> NoReturn:
    """Send the outbox's events to the API process until the channel closes. Events of short steps share a message."""
    name_thread("kvasir-carrier")
    try:
        while True:
            events = gathered(outbox)
            next_seconds = time.monotonic() + _MESSAGE_SECONDS
            channel.send(encode_events(events))
            time.sleep(max(0.0, next_seconds - time.monotonic()))
    except OSError:  # the channel is closed; main ends the service
        os._exit(1)


def _send(channel: WorkerChannel, events: list[Event]) -> None:
    try:
        channel.send(encode_events(events))
    except OSError:  # the channel is closed; main ends the service
        os._exit(1)


def _end_start(error: Exception, *, is_memory: bool) -> NoReturn:
    """Print in one line why the engine cannot be built, and end the worker process with the exit code of the reason."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    first_line = first_line[max(0, first_line.find(_CPU_MEMORY)) :]  # skip torch's source file and line number
    flags = "--kv-cache-memory, --max-batched-tokens or --max-context-length"
    advice = f"; lower {flags}, or use a smaller model" if is_memory else ""
    with suppress(OSError):  # stderr may be closed
        print(f"kvasir serve: {first_line}{advice}", file=sys.stderr, flush=True)
    exit_codes: dict[type[Exception], int] = {SettingsError: EXIT_SETTINGS, CheckpointChanged: EXIT_CHECKPOINT_CHANGED}
    # Skips the interpreter's finalization, which would abort the process while a thread is inside torch.
    os._exit(exit_codes.get(type(error), EXIT_START_FAILED))


def gathered(outbox: SimpleQueue[list[Event]]) -> list[Event]:
    """Return all events of the worker's outbox, in order. Block until there is an event."""
    events = list(outbox.get())
    with suppress(Empty):
        while True:
            events.extend(outbox.get_nowait())
    return events


def _ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM, which terminals and systemd send to every process: a drain needs the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # a compiler process would inherit SIG_IGN


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return the size and modification time of each file. Raises `OSError` if a file is missing."""
    stats = {path: path.stat() for path in paths}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in stats.items()}


def check_unchanged(stamps: Stamps) -> None:
    """Raise `CheckpointChanged` if a file has changed since its stamp was taken, or is missing."""
    for path, stamp in stamps.items():
        try:
            is_same = stamps_of([path]) == {path: stamp}
        except OSError as error:
            raise CheckpointChanged(f"{path}: {error.strerror}; restore the file and restart the service") from None
        if not is_same:
            raise CheckpointChanged(f"{path} has changed since the service started; restart the service")


def importable_name(cls: type) -> str:
    """Return "module:class", by which another process can import a class, even a class of `__main__`."""
    module = cls.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    return f"{module}:{cls.__qualname__}"


def _import_at_low_priority() -> None:
    """Import torch at the lowest priority, which only this thread gets: a process cannot raise its priority again."""
    with suppress(OSError):  # forbidden in some sandboxes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    import_engine()


def import_engine() -> None:
    """Import torch and all modules that build the engine."""
    if not has_nvidia_driver() and importlib.metadata.version("torch").startswith(_TESTED_TORCH):
        sys.modules.setdefault(_UNUSED_IMPORT, ModuleType(_UNUSED_IMPORT))
    with suppress(Exception):  # the worker imports the module again, and then reports the error
        importlib.import_module(_IMPORT)
