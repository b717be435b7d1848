"""The worker process: LitAPI builds the engine, LitLoop runs it in one thread. The only user of the engine.

A pump thread takes commands from LitServe's queue, whose every access is a trip to another process, and leaves
them in an inbox that costs nothing to look at. The loop blocks on the inbox when there is no work, empties it before
each step, and leaves one message a step for each API process in an outbox, which a carrier thread empties.
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from litserve import LitAPI
from litserve.loops import LitLoop
from litserve.specs.base import LitSpec
from litserve.utils import LitAPIStatus, LoopResponseType

from model.manifest import Manifest
from service import logs
from service.lifecycle import Lifecycle, Phase
from service.messages import (
    API_PATH,
    BUS,
    Cancel,
    Event,
    Hello,
    Look,
    Looked,
    Submit,
    TokenDelta,
    decode_command,
    encode_events,
)
from service.metrics import Metrics
from service.settings import ServeSettings, effective_values

if TYPE_CHECKING:
    from service.engine.engine import Engine
    from service.engine_builder import EngineFacts

logger = logging.getLogger(__name__)

# A worker that cannot start says why in one line and ends with this code, so that main need not guess.
EXIT_TOLD = 3
# What a client is told of an exception in here.
_FAILED = "the engine failed on this request"
# Looks get a quarter of the time while anything streams, at most: after one of x seconds, 3x are for steps.
_STEPS_PER_LOOK = 3.0
# An engine that fails twice in a row is replaced: its state, or the device's, can't be trusted.
_MAX_FAILURES_IN_A_ROW = 2

Parcel: TypeAlias = tuple[int, tuple[bytes, ...]]  # API process, encoded commands
Send: TypeAlias = Callable[[int, list[Event]], None]


class EngineAPI(LitAPI):  # type: ignore[misc]  # litserve has no types
    """What LitServe carries to the worker process, and calls there to build the engine.

    Args:
        found: what main knows of the values in force, by name.
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
        self.found = found
        self.lifecycle = lifecycle

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets: everything but the routes, which stay in the API process."""
        return {**self.__dict__, "_spec": None}

    async def authorize(self) -> None:
        """Everybody may come in. LitServe's own dependency is not async, so it costs each request a thread."""

    def setup(self, device: str) -> None:
        """Build the engine. LitServe's `device` is a place holder; the settings' decides.

        Raises:
            SystemExit: the engine cannot be built; one line on stderr has said why.
        """
        # Not above: main imports this module too, and so the API process forked from it would hold torch, which
        # costs 2 s and 217 MiB.
        import torch

        self.started_seconds = self.lifecycle.epoch_seconds.value
        logs.configure(self.settings.log_level)
        _obey_only_main(self.lifecycle)
        try:
            self.engine, self.facts = self.build()
            if self.lifecycle.epoch.value == 0:  # once, and when all of it is known
                found = {**self.found, **self.facts.found()}
                print("\n".join(effective_values(self.settings, found)), flush=True)
        except (ValueError, RuntimeError, MemoryError, OSError) as error:
            self._tell(error, is_memory=isinstance(error, (MemoryError, torch.OutOfMemoryError)))
            raise SystemExit(EXIT_TOLD) from None

    def build(self) -> "tuple[Engine, EngineFacts]":
        """The engine, ready to serve, and what "auto" came to. Raises what `engine_builder.build_engine` does."""
        from service.engine_builder import build_engine

        engine, facts = build_engine(self.settings, self.manifest)
        engine.warm_up()
        return engine, facts

    def _tell(self, error: Exception, *, is_memory: bool) -> None:
        """Why the engine cannot be built, in one line."""
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "; lower --kv-cache-memory or --max-context-length, or take a smaller model" if is_memory else ""
        print(f"kvasir serve: {first_line}{advice}", file=sys.stderr, flush=True)


class EngineLoop(LitLoop):  # type: ignore[misc]
    """LitServe calls it once, in the worker, after `EngineAPI.setup`."""

    def __call__(
        self,
        lit_api: EngineAPI,
        device: str,
        worker_id: int,
        request_queue: Any,
        transport: Any,
        workers_setup_status: Any,
        callback_runner: Any,
    ) -> NoReturn:
        """Serve until the process ends."""
        inbox: SimpleQueue[Parcel] = SimpleQueue()

        outbox: SimpleQueue[tuple[int, bytes]] = SimpleQueue()

        def send(api_id: int, events: list[Event]) -> None:
            outbox.put((api_id, encode_events(events)))

        carrier = threading.Thread(target=self._carry, args=(outbox, transport), name="carrier", daemon=True)
        carrier.start()
        pump = threading.Thread(
            target=self._pump, args=(request_queue, inbox, lit_api.lifecycle), name="pump", daemon=True
        )
        pump.start()
        metrics = Metrics(lit_api.settings.model_name or lit_api.manifest.name)
        facts = lit_api.facts
        hello = Hello(
            worker_id=worker_id,
            epoch=lit_api.lifecycle.epoch.value,
            device=facts.device,
            dtype=facts.dtype,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            startup_seconds=time.monotonic() - lit_api.started_seconds,
        )
        metrics.observe_worker_start(hello)
        logger.info("%s, ready after %.1f s", facts, hello.startup_seconds)
        send(0, [hello])
        driver = Driver(lit_api.engine, inbox=inbox, send=send, metrics=metrics)
        while True:
            driver.turn()

    def _carry(self, outbox: SimpleQueue[tuple[int, bytes]], transport: Any) -> NoReturn:
        """Bring messages to LitServe's queue, a trip to another process each, while the next step computes."""
        while True:
            api_id, message = outbox.get()
            try:
                self.put_response(transport, api_id, BUS, message, LitAPIStatus.OK, LoopResponseType.STREAMING)
            except (EOFError, OSError):  # the queue process is gone; main ends the service
                os._exit(1)

    def _pump(self, request_queue: Any, inbox: SimpleQueue[Parcel], lifecycle: Lifecycle) -> None:
        while True:
            lifecycle.end_if_orphaned()
            try:
                item = self.get_request(request_queue, timeout=1.0)
            except (EOFError, OSError):  # the queue process is gone; main ends the service
                os._exit(1)
            if item is not None:
                api_id, _, _, payload = item
                inbox.put((api_id, payload))


class Driver:
    """Feeds the engine and carries its events away. The only thread that touches the engine.

    Args:
        inbox: commands, from the pump thread.
        send: delivers events to an API process.
        clock: seconds, for sharing the time between steps and looks.
    """

    def __init__(
        self,
        engine: "Engine",
        *,
        inbox: SimpleQueue[Parcel],
        send: Send,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._metrics = metrics
        self._owners: dict[str, tuple[int, int]] = {}  # uid -> API process, attempt
        self._looks: dict[str, tuple[int, Look]] = {}  # uid -> API process, in order of arrival
        self._clock = clock
        self._next_look_seconds = -math.inf  # by the clock, while there are steps to compute
        self._num_failures = 0

    def turn(self) -> None:
        """Wait for work if there is none, take all commands, compute one step and one look, send what they gave.

        Raises:
            RuntimeError: the engine failed again, right after it was cleared.
        """
        if not self._engine.has_work and not self._looks:
            self._engine.check_integrity()
            self._metrics.observe_idle()
            self._take(self._inbox.get())
        with suppress(Empty):
            while True:
                self._take(self._inbox.get_nowait())
        if self._engine.has_work:
            self._step()
        if self._looks and (not self._engine.has_work or self._clock() >= self._next_look_seconds):
            self._look()

    def _look(self) -> None:
        """Answer one look, the oldest. Streams wait for it, so they get their share of time before the next."""
        uid = next(iter(self._looks))
        api_id, look = self._looks.pop(uid)
        began, weights = self._clock(), None
        try:
            weights = self._engine.attention_weights(look.token_ids, layer=look.layer, heads=look.heads)
        except Exception:  # as in a step: whoever asked gets an answer, and the service goes on
            logger.exception("the engine failed on a look at layer %d", look.layer)
        ended = self._clock()
        self._next_look_seconds = ended + _STEPS_PER_LOOK * (ended - began)
        self._send(api_id, [Looked(uid=uid, weights=weights, compute_seconds=ended - began)])

    def _step(self) -> None:
        try:
            result = self._engine.step()
        except Exception as error:  # whatever it was, every request gets an ending and the service goes on
            logger.exception("the engine failed; its %d sequences end with an error", len(self._owners))
            self._num_failures += 1
            self._emit(self._engine.abort_all(_FAILED))
            if self._num_failures >= _MAX_FAILURES_IN_A_ROW:
                raise RuntimeError("the engine failed twice in a row") from error
            return
        self._num_failures = 0
        self._emit(result.events)
        self._metrics.observe_step(result.stats)

    def _take(self, parcel: Parcel) -> None:
        api_id, payload = parcel
        for command in map(decode_command, payload):
            match command:
                case Submit():
                    self._owners[command.uid] = (api_id, command.attempt)
                    self._engine.submit(command)
                case Look():
                    self._looks[command.uid] = (api_id, command)
                case Cancel():
                    self._looks.pop(command.uid, None)
                    if self._owners.pop(command.uid, None) is not None:
                        self._engine.cancel(command.uid)

    def _emit(self, deltas: list[TokenDelta]) -> None:
        """One message to each API process that has a part in this step."""
        messages: dict[int, list[Event]] = {}
        for delta in deltas:
            owner = self._owners.get(delta.uid)
            if owner is None or owner[1] != delta.attempt:
                continue  # cancelled
            messages.setdefault(owner[0], []).append(delta)
            if delta.finish is not None:
                del self._owners[delta.uid]
        for api_id, events in messages.items():
            self._send(api_id, events)


def _obey_only_main(lifecycle: Lifecycle) -> None:
    """Ignore the signals that a terminal or systemd sends to every process: main drains, then tells the others."""

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if lifecycle.phase.value == Phase.STOPPING:
            os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
