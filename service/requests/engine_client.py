"""Engine client of the API process: unfinished requests, which survive the death of a worker process.

A request stays with the worker that it was first sent to, and with that worker's replacements. A new worker sends
`WorkerReady` and gets its unfinished requests again, with the tokens that were already received.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from service.admission.controller import Admission
from service.ipc.messages import (
    ADAPTER_LOST,
    NON_FINITE,
    Cancel,
    Command,
    EngineIdle,
    Event,
    Finish,
    FinishReason,
    Started,
    StepStats,
    TokenDelta,
    WorkerReady,
)
from service.protocol.errors import ApiError, EngineFailed, InvalidRequest, QueueTimeout
from service.requests.adapters import AdapterRegistry, ServedAdapter
from service.requests.dispatcher import Dispatcher
from service.requests.engine_worker import EngineWorker
from service.requests.inflight import Choice, InflightQuery, InflightRequest

logger = logging.getLogger(__name__)

Inflight: TypeAlias = InflightRequest | InflightQuery

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.REFUSED)


@dataclass(kw_only=True, slots=True, eq=False)
class EngineClient:
    """Owner of the unfinished requests and attention queries: submits them to workers, and delivers their events."""

    workers: Sequence[EngineWorker]
    dispatcher: Dispatcher
    admission: Admission
    on_worker_ready: Callable[[WorkerReady, int], None]  # gets the worker's index, before requests are resubmitted
    on_engine: Callable[[StepStats | EngineIdle, int], None]
    on_replay: Callable[[str], None]  # gets "resubmitted" per request, and "gave_up" for a poison request
    on_late: Callable[[int], None]  # gets the number of tokens that arrived for a cancelled sequence
    on_count: Callable[[int], None]  # gets the number of unfinished requests when the number changes
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    _requests: dict[Inflight, None] = field(default_factory=dict)  # in order of arrival
    _choices: dict[str, tuple[Inflight, Choice | InflightQuery]] = field(default_factory=dict)  # unfinished, by uid

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests, attention queries included."""
        return len(self._requests)

    @property
    def num_queries(self) -> int:
        """Number of unfinished attention queries."""
        return sum(isinstance(request, InflightQuery) for request in self._requests)

    def submit(self, request: Inflight) -> None:
        """Admit and send a request, or send an attention query without admission. An exception leaves no state.

        Raises `Overloaded` if the request is not admitted, and ModelNotFound if its adapter has been unloaded.
        """
        self.adapters.acquire(request.adapter)
        try:
            self._submit(request)
        except BaseException:
            self._send_to_all(self.adapters.release(request.adapter))
            raise

    def _submit(self, request: Inflight) -> None:
        if isinstance(request, InflightRequest):
            self.admission.admit([choice.num_counted_tokens for choice in request.choices], request.terms)
            request.apply_terms()
            request.worker = self.dispatcher.choose(request.choices[0].submit)
            request.worker.num_tokens += sum(choice.num_counted_tokens for choice in request.choices)
        else:
            request.worker = self.dispatcher.choose(None)
        self._requests[request] = None
        self._choices.update((choice.submit.uid, (request, choice)) for choice in request.choices)
        try:
            self._release(request.worker, (choice.submit.uid for choice in request.choices))
        except BaseException:
            del self._requests[request]
            for choice in request.choices:
                self._discard(choice.submit.uid)  # all choices, before a later send can fail too
            raise
        self.on_count(self.num_requests)

    def finish(self, request: Inflight) -> int:
        """Forget a request or query and cancel its unfinished choices. Return the number of cancelled choices."""
        is_known = request in self._requests
        self._requests.pop(request, None)
        uids = [choice.submit.uid for choice in request.choices if choice.submit.uid in self._choices]
        for uid in uids:
            self._discard(uid)
        if uids:
            request.worker.send([Cancel(uid=uid) for uid in uids])
            self._release(request.worker)
        if is_known:
            self._send_to_all(self.adapters.release(request.adapter))
        self.on_count(self.num_requests)
        return len(uids)

    def receive(self, events: Sequence[Event], worker: int = 0) -> None:
        """Update requests, admission and metrics from the events of one message, and send new tokens to the clients.

        worker: index of the worker that has sent the message.
        """
        touched: dict[InflightRequest, None] = {}
        for event in events:
            if isinstance(event, TokenDelta):
                if (request := self._receive_delta(event)) is not None:
                    touched[request] = None
            elif isinstance(event, WorkerReady):
                self._replay(event, self.workers[worker])
            elif isinstance(event, StepStats | EngineIdle):
                if isinstance(event, StepStats):
                    self.admission.limit_running(event.max_num_running, worker)
                self.on_engine(event, worker)
            elif (entry := self._choices.get(event.uid)) is None:
                continue  # the choice or query has ended
            elif isinstance(event, Started):
                if event.attempt == entry[1].submit.attempt:  # not from a dead worker
                    entry[0].worker.detector.record_start(event.uid)
                    if isinstance(entry[1], Choice) and not entry[1].has_started:
                        entry[1].begin_seconds = time.monotonic()
            elif isinstance(entry[1], InflightQuery):
                entry[1].set_answer(event)
                self._discard(event.uid)
                self._release(entry[0].worker)
        # All system calls (`send`) run after all Python code, so that each finds its code in the CPU caches.
        for send in [request.deliver() for request in touched]:
            if send is not None:
                send()

    def load_adapter(self, adapter: ServedAdapter) -> None:
        """Let later requests use an adapter. The workers load it, unless it is loaded under another name."""
        self._send_to_all(self.adapters.add(adapter))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter by name. The workers keep it until the unfinished requests that use it have ended."""
        self._send_to_all(self.adapters.remove(name))

    def adapter_names(self, *, has_started: bool) -> list[str]:
        """Return the names of adapters that unfinished requests use: requests with a token, or else without one."""
        requests = (request for request in self._requests if request.adapter and request.has_started == has_started)
        return self.adapters.names(request.adapter for request in requests)

    def fail_all(self, error: ApiError) -> None:
        """End every unfinished request and query with `error`, unless it has failed already."""
        for request in self._requests:
            request.fail(error)

    def expire(self, now: float) -> None:
        """Fail the requests that wait beyond their queue deadline.

        A request that its worker has begun to compute fails only if the worker is stalled and no token has arrived.
        """
        for request in self._requests:
            deadline = request.terms.deadline(request.arrival_seconds)
            has_expired = deadline is not None and deadline < now and not (request.has_started or request.has_failed)
            has_begun = any(request.worker.detector.is_running(choice.submit.uid) for choice in request.choices)
            if has_expired and (request.worker.is_stalled or not has_begun):
                request.fail(self._queue_timeout(request, has_begun=has_begun))

    def wake_silent_requests(self, *, since_seconds: float) -> None:
        """Make each stream whose last bytes were sent before the time `since_seconds` send a keep-alive."""
        for request in self._requests:
            if isinstance(request, InflightRequest) and request.last_sent_seconds < since_seconds:
                request.wake.set()

    def _receive_delta(self, delta: TokenDelta) -> InflightRequest | None:
        """Add a token delta to its choice. Return the request if it has deltas to deliver, else None."""
        uid = delta.uid
        entry = self._choices.get(uid)
        if entry is None:
            self.on_late(len(delta.token_ids))  # computed before the worker read the cancellation
            return None
        request, choice = entry
        if delta.attempt != choice.submit.attempt or isinstance(request, InflightQuery):
            return None  # from a dead worker
        assert isinstance(choice, Choice)
        if delta.finish is not None and choice.retry_seconds:
            delta = msgspec.structs.replace(delta, finish=choice.over_all_attempts(delta.finish))
        has_failed = delta.finish is not None and delta.finish.reason in _FAILURES
        # A failed step may have sampled tokens that were never sent.
        if delta.index != len(choice.token_ids) and not has_failed:
            expected = len(choice.token_ids)
            logger.error(
                "sequence %s fails: its new tokens begin at index %d instead of %d", uid, delta.index, expected
            )
            request.fail(EngineFailed("the engine's output arrived out of order; try again", retry=True))
            return None
        if not choice.has_started:
            self.admission.started(choice.num_counted_tokens, choice.submit.tenant)
        choice.add(delta)
        if not (detector := request.worker.detector).is_empty:
            again: list[str] = []
            if detector.record_progress(uid) and delta.finish is None:
                # The choice leaves the worker, because the next suspect must run alone.
                request.worker.send([Cancel(uid=uid)])
                choice.retry()
                again.append(uid)
            self._release(request.worker, again)
        if delta.finish is not None:
            self._discard(uid)
            self._release(request.worker)
            if has_failed:
                request.fail(self._failure(request, choice, delta.finish))
                return None
        if not request.push(choice, delta):
            self.finish(request)
        return request

    def _replay(self, ready: WorkerReady, worker: EngineWorker) -> None:
        """Send a new worker the adapters, and its unfinished requests unless it is the first process (epoch 0).

        A poison request fails instead.
        """
        worker.accept(ready)
        self.on_worker_ready(ready, worker.index)
        worker.send(self.adapters.load_commands())
        self.admission.limit_running(None, worker.index)
        if ready.epoch == 0:
            return
        self.dispatcher.forget(worker)
        if (uid := worker.detector.record_crash()) is not None:
            request, _ = self._choices[uid]
            logger.error("poison request %s (%s) fails: several workers died computing it", uid, request.terms.tenant)
            request.fail(EngineFailed("the worker died repeatedly on this request", retry=False))
            self.on_replay("gave_up")
        again: list[str] = []
        for request in [request for request in self._requests if request.worker is worker]:
            waiting = [choice for choice in request.choices if choice.submit.uid in self._choices]
            if request.has_failed:
                for choice in waiting:
                    worker.detector.forget(choice.submit.uid)
            elif waiting:
                for choice in waiting:
                    choice.retry()
                again += [choice.submit.uid for choice in waiting]
                self.on_replay("resubmitted")
        self._release(worker, again)

    def _release(self, worker: EngineWorker, uids: Iterable[str] = ()) -> None:
        """Hold the choices `uids`. Send to the worker the held choices that its poison detector releases."""
        if released := worker.detector.release(uids):
            worker.send([self._choices[uid][1].submit for uid in released])

    def _send_to_all(self, commands: Sequence[Command]) -> None:
        for worker in self.workers if commands else ():
            worker.send(commands)

    def _failure(self, request: InflightRequest, choice: Choice, finish: Finish) -> ApiError:
        """Return the error to send to the client of a sequence that the worker could not finish."""
        if finish.reason is FinishReason.ABORT and not choice.token_ids:
            # A cancelled sequence sends no event, so the abort means that the deadline has passed.
            return self._queue_timeout(request, has_begun=False)
        if finish.reason is FinishReason.REFUSED:
            params = choice.submit.params
            named = {"allowed_token_ids": params.allowed_token_ids, "bad_words": params.bad_word_ids}
            param = next((name for name, ids in named.items() if ids), choice.grammar_param)
            return InvalidRequest(
                finish.error or "the request's token rules or grammar allow no next token; relax them", param=param
            )
        if finish.error in (NON_FINITE, ADAPTER_LOST):
            return EngineFailed(finish.error, retry=False)
        return EngineFailed("the engine failed on this request", retry=True)

    def _queue_timeout(self, request: Inflight, *, has_begun: bool) -> QueueTimeout:
        counts = [choice.num_counted_tokens if isinstance(choice, Choice) else 1 for choice in request.choices]
        event = "finish" if has_begun else "start"
        return QueueTimeout(
            f"the request did not {event} within its timeout of {request.terms.timeout_seconds:g} s; try again later",
            retry_after_seconds=self.admission.retry_after(counts, request.terms),
        )

    def _discard(self, uid: str) -> None:
        """Remove a choice that has ended or is cancelled, and report the end to admission."""
        request, choice = self._choices.pop(uid)
        request.worker.detector.forget(uid)
        if isinstance(choice, Choice):
            request.worker.num_tokens -= choice.num_counted_tokens
            if not choice.has_started:
                self.admission.started(choice.num_counted_tokens, choice.submit.tenant)
            self.admission.ended(choice.submit.tenant)
