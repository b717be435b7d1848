"""Feeds the engine and carries its events away: what the worker's thread does at every turn.

Nothing here knows processes or queues, so that a test can turn it by hand.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from service.messages import (
    Cancel,
    Event,
    Look,
    Looked,
    RunningLimitChanged,
    Started,
    Submit,
    TokenDelta,
    decode_command,
)
from service.metrics import Metrics

if TYPE_CHECKING:
    from service.engine.engine import Engine

logger = logging.getLogger(__name__)

# What a client is told of an exception in here.
_FAILED = "the engine failed on this request"
# Looks get a quarter of the time while anything streams, at most: after one of x seconds, 3x are for steps.
_STEPS_PER_LOOK = 3.0
# An engine that fails twice in a row is replaced: its state, or the device's, can't be trusted.
_MAX_FAILURES_IN_A_ROW = 2
# How often a worker without work says that it is well.
_BEAT_SECONDS = 1.0

Parcel: TypeAlias = tuple[int, tuple[bytes, ...]]  # API process, encoded commands
Send: TypeAlias = Callable[[int, list[Event]], None]


class Driver:
    """Feeds the engine and carries its events away. The only thread that touches the engine.

    Args:
        inbox: commands, from the pump thread.
        send: delivers events to an API process, in order.
        send_now: the same, and they are out of this process when it returns.
        beat: called at every turn, and every second of a wait.
        clock: seconds, for sharing the time between steps and looks.
    """

    def __init__(
        self,
        engine: "Engine",
        *,
        inbox: SimpleQueue[Parcel],
        send: Send,
        send_now: Send,
        metrics: Metrics,
        beat: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._send_now = send_now
        self._metrics = metrics
        self._beat = beat
        self._owners: dict[str, tuple[int, int]] = {}  # uid -> API process, attempt
        self._started: set[str] = set()  # of these, what the engine has begun to compute
        self._looks: dict[str, tuple[int, Look]] = {}  # uid -> API process, in order of arrival
        self._clock = clock
        self._next_look_seconds = -math.inf  # by the clock, while there are steps to compute
        self._num_failures = 0
        self._max_num_running = engine.max_num_running  # as the API processes know it

    def turn(self) -> None:
        """Wait for work if there is none, take all commands, compute one step and one look, send what they gave.

        Raises:
            RuntimeError: the engine failed again, right after it was cleared.
        """
        if not self._engine.has_work and not self._looks:
            self._metrics.observe_idle()
            self._take(self._next_parcel())
        with suppress(Empty):
            while True:
                self._take(self._inbox.get_nowait())
        self._beat()
        if self._engine.has_work:
            self._step()
        if self._looks and (not self._engine.has_work or self._clock() >= self._next_look_seconds):
            self._look()

    def _next_parcel(self) -> Parcel:
        while True:
            self._beat()
            with suppress(Empty):
                return self._inbox.get(timeout=_BEAT_SECONDS)

    def _look(self) -> None:
        """Answer one look, the oldest. Streams wait for it, so they get their share of time before the next."""
        uid = next(iter(self._looks))
        api_id, look = self._looks.pop(uid)
        self._send_now(api_id, [Started(uid=uid, attempt=look.attempt)])
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
            result = self._engine.step(before=self._tell_started)
        except Exception as error:  # whatever it was, every request gets an ending and the service goes on
            logger.exception("the engine failed; its %d sequences end with an error", len(self._owners))
            self._num_failures += 1
            self._emit(self._engine.abort_all(_FAILED))
            self._metrics.flush()
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
                    self._started.discard(command.uid)
                    if command.grammar is not None:  # which is compiled at once
                        self._tell_started([command.uid])
                    self._engine.submit(command)
                case Look():
                    self._looks[command.uid] = (api_id, command)
                case Cancel():
                    self._looks.pop(command.uid, None)
                    self._started.discard(command.uid)
                    if self._owners.pop(command.uid, None) is not None:
                        self._engine.cancel(command.uid)

    def _tell_started(self, uids: list[str]) -> None:
        """Have it known whose computation begins, before it does: should this process die of it, the API process knows
        whom to suspect."""
        new = [uid for uid in uids if uid not in self._started]
        self._started.update(new)
        messages: dict[int, list[Event]] = {}
        for uid in new:
            api_id, attempt = self._owners[uid]
            messages.setdefault(api_id, []).append(Started(uid=uid, attempt=attempt))
        for api_id, events in messages.items():
            self._send_now(api_id, events)

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
                self._started.discard(delta.uid)
        if messages and self._max_num_running != self._engine.max_num_running:
            self._max_num_running = self._engine.max_num_running
            for events in messages.values():
                events.append(RunningLimitChanged(max_num_running=self._max_num_running))
        for api_id, events in messages.items():
            self._send(api_id, events)
