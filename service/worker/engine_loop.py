"""Engine loop of the worker: pass commands to the engine, run steps, send events. Knows no processes or sockets."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from service.ipc.messages import (
    AttentionQuery,
    AttentionResult,
    Cancel,
    Command,
    EngineIdle,
    Event,
    LoadAdapter,
    Started,
    Submit,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from service.engine.engine import Engine

logger = logging.getLogger(__name__)

# Error message that a client gets when the engine raises an exception.
_FAILED = "the engine failed on this request"
# Attention queries get at most a quarter of the time while sequences run: after a query of x seconds, steps get 3x.
_STEPS_PER_QUERY = 3.0
# Failed steps in a row after which the worker is replaced: the state of the engine or device cannot be trusted.
_MAX_FAILURES_IN_A_ROW = 2
# Interval between heartbeats of an idle worker.
_BEAT_SECONDS = 1.0

Receive: TypeAlias = Callable[[float], Iterable[Command] | None]
Send: TypeAlias = Callable[[list[Event]], None]


class EngineLoop:
    """Loop of the only thread that uses the engine.

    Args:
        receive: returns the next commands; None if no command arrives within the given seconds.
        send: sends events to the API process, in order.
        send_now: sends events like `send`, and returns only when the events have left this process.
        beat: records a heartbeat; called in every iteration, and every second of a wait.
        after_step: called after every engine step.
    """

    def __init__(
        self,
        engine: "Engine",
        *,
        receive: Receive,
        send: Send,
        send_now: Send,
        beat: Callable[[], None],
        after_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._receive = receive
        self._send = send
        self._send_now = send_now
        self._beat = beat
        self._after_step = after_step
        self._queries: dict[str, AttentionQuery] = {}  # by uid, in order of arrival
        self._clock = clock
        self._next_query_seconds = -math.inf  # earliest time of the next query while sequences run
        self._num_failures = 0
        self._is_prepared = False  # for grammars

    def run_once(self) -> None:
        """Run one iteration: wait for work, take all commands, run at most one step and one attention query.

        Raises:
            RuntimeError: two engine steps in a row have failed, and all sequences have been aborted. Or the CUDA device
                is unusable for this process: its sequences have not ended, and a new worker continues them.
        """
        if not self._engine.has_work and not self._queries:
            self._send([EngineIdle()])
            self._handle(self._wait_for_commands())
        while (commands := self._receive(0.0)) is not None:
            self._handle(commands)
        self._beat()
        if self._engine.has_work:
            self._step()
        if self._queries and (not self._engine.has_work or self._clock() >= self._next_query_seconds):
            self._answer_query()

    def _wait_for_commands(self) -> Iterable[Command]:
        while True:
            self._beat()
            if (commands := self._receive(_BEAT_SECONDS)) is not None:
                return commands
            if not self._is_prepared:  # in an idle second, since it may take as long: streams and requests go first
                self._engine.prepare_grammars()
                self._is_prepared = True

    def _answer_query(self) -> None:
        """Compute the oldest attention query. The next query then waits while steps run for three times as long."""
        uid = next(iter(self._queries))
        query = self._queries.pop(uid)
        self._send_now([Started(uid=uid, attempt=query.attempt)])
        began, weights = self._clock(), None
        try:
            weights = self._engine.attention_weights(query.token_ids, layer=query.layer, heads=query.heads)
        except Exception as error:  # as in a step, the client gets an error and the service continues
            _check_device(error)
            logger.exception("an attention query of layer %d failed; its client gets an error", query.layer)
        ended = self._clock()
        self._next_query_seconds = ended + _STEPS_PER_QUERY * (ended - began)
        self._send([AttentionResult(uid=uid, weights=weights, compute_seconds=ended - began)])

    def _step(self) -> None:
        try:
            result = self._engine.step(before=self._report_started)
        except Exception as error:  # on any failure every request gets an error, and the service continues
            _check_device(error)
            logger.exception("an engine step failed; all unfinished sequences end with an error")
            self._num_failures += 1
            if endings := self._engine.abort_all(_FAILED):
                self._send([*endings])
            if self._num_failures >= _MAX_FAILURES_IN_A_ROW:
                raise RuntimeError("two engine steps in a row failed; the worker process ends") from error
            return
        self._num_failures = 0
        self._send([*result.events, result.stats])
        self._after_step()

    def _handle(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    if command.grammar is not None:  # its compilation begins with `submit`, before any step
                        self._report_started([(command.uid, command.attempt)])
                    self._engine.submit(command)
                case LoadAdapter():
                    self._engine.load_adapter(command)
                case UnloadAdapter():
                    self._engine.unload_adapter(command.key)
                case AttentionQuery():
                    self._queries[command.uid] = command
                case Cancel():
                    self._queries.pop(command.uid, None)
                    self._engine.cancel(command.uid)

    def _report_started(self, sequences: list[tuple[str, int]]) -> None:
        """Send `Started` for each (uid, attempt) before its first step, so that a crash can be attributed to it."""
        self._send_now([Started(uid=uid, attempt=attempt) for uid, attempt in sequences])


def _check_device(error: Exception) -> None:
    """Raise RuntimeError if an engine's failure is a CUDA error, after which all CUDA calls of this process fail.

    Exhausted memory is another error, `torch.OutOfMemoryError`. This module does not import torch.
    """
    if type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error):
        raise RuntimeError("the CUDA device reported an error; the worker process ends") from error
