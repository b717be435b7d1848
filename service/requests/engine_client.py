"""Engine client of the API process: all unfinished requests, their submitted work and their results so far.

Unfinished requests survive the death of a worker. A new worker sends `WorkerReady` and gets all unfinished work again,
with the tokens that were already received.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import msgspec

from service.admission.controller import Admission
from service.ipc.messages import (
    NON_FINITE,
    AttentionResult,
    Cancel,
    Command,
    EngineIdle,
    Event,
    Finish,
    FinishReason,
    RunningLimitChanged,
    Started,
    StepStats,
    Submit,
    TokenDelta,
    WorkerReady,
)
from service.protocol.errors import ApiError, EngineFailed, InvalidRequest, QueueTimeout
from service.requests.inflight import Choice, InflightQuery, InflightRequest
from service.requests.poison_detector import PoisonRequestDetector, Work

logger = logging.getLogger(__name__)

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.REFUSED)


class EngineClient:
    """Owner of the live requests. One thread: the API process' event loop.

    Args:
        send: sends commands to the worker, in order.
        admission: limits the live requests.
        on_worker_ready: called with the `WorkerReady` of each new worker, before requests are resubmitted.
        on_engine: called with the statistics of each step, and when the engine has no work left.
        on_replay: called per request with the outcome of its resubmission: "resubmitted" or "gave_up".
        on_late: called with the number of tokens that arrived for a cancelled sequence.
    """

    def __init__(
        self,
        *,
        send: Callable[[Sequence[Command]], None],
        admission: Admission,
        on_worker_ready: Callable[[WorkerReady], None],
        on_engine: Callable[[StepStats | EngineIdle], None],
        on_replay: Callable[[str], None],
        on_late: Callable[[int], None],
    ) -> None:
        self._send = send
        self._admission = admission
        self._on_worker_ready = on_worker_ready
        self._on_engine = on_engine
        self._on_replay = on_replay
        self._on_late = on_late
        self._choices: dict[str, tuple[InflightRequest, Choice]] = {}
        self._requests: dict[InflightRequest, None] = {}  # in order of arrival
        self._looks: dict[str, InflightQuery] = {}  # in order of arrival
        self._detector = PoisonRequestDetector()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_looks(self) -> int:
        return len(self._looks)

    def open(self, request: InflightRequest) -> None:
        """Admit a request and submit all its choices at once.

        Raises:
            Overloaded: the queue is full, or the request would wait too long.

        After any exception, also of `send`, the request is not open.
        """
        terms = request.terms
        self._admission.admit([choice.num_counted_tokens for choice in request.choices], terms)
        # The first choice begins first. Once it has begun, the other choices have no deadline.
        deadlines = [terms.deadline(request.arrival_seconds), *[None] * (len(request.choices) - 1)]
        for choice, deadline in zip(request.choices, deadlines, strict=True):
            choice.submit = msgspec.structs.replace(
                choice.submit, tenant=terms.tenant, cache_namespace=terms.cache_namespace, deadline_seconds=deadline
            )
        self._requests[request] = None
        self._choices |= {choice.submit.uid: (request, choice) for choice in request.choices}
        try:
            self._submit([choice.submit for choice in request.choices])
        except BaseException:
            del self._requests[request]
            for choice in request.choices:
                self._drop(choice)  # all choices, before a later send can fail too
            raise

    def close(self, request: InflightRequest) -> int:
        """Drop a request and cancel its unfinished choices. Returns the number of cancelled choices."""
        self._requests.pop(request, None)
        unfinished = [choice for choice in request.choices if choice.submit.uid in self._choices]
        for choice in unfinished:
            self._drop(choice)
        if unfinished:
            self._send([Cancel(uid=choice.submit.uid) for choice in unfinished])
            self._release()
        return len(unfinished)

    def submit_query(self, live: InflightQuery) -> None:
        """Submit an attention look. Call `cancel_query` after its response or its cancellation."""
        self._looks[live.look.uid] = live
        try:
            self._submit([live.look])
        except BaseException:
            del self._looks[live.look.uid]
            self._detector.forget(live.look.uid)
            raise

    def cancel_query(self, live: InflightQuery) -> None:
        """Drop a look, and cancel it if it has no response yet."""
        uid = live.look.uid
        del self._looks[uid]
        self._detector.forget(uid)
        if not live.is_answered:
            self._send([Cancel(uid=uid)])
        self._release()

    def receive(self, events: Sequence[Event]) -> None:
        """Process the events of one message of a worker."""
        touched: dict[InflightRequest, None] = {}
        for event in events:
            if isinstance(event, TokenDelta):
                if (request := self._receive_delta(event)) is not None:
                    touched[request] = None
            elif isinstance(event, WorkerReady):
                self._replay(event)
            elif isinstance(event, RunningLimitChanged):
                self._admission.limit_running(event.max_num_running)
            elif isinstance(event, Started):
                self._receive_start(event)
            elif isinstance(event, StepStats | EngineIdle):
                self._on_engine(event)
            else:
                self._receive_look(event)
        # All system calls (`send`) run after all Python code, so that each finds its code in the CPU caches.
        for send in [request.tell() for request in touched]:
            if send is not None:
                send()

    def fail_all(self, error: ApiError) -> None:
        """End every live request."""
        for live in self._live():
            live.fail(error)

    def expire(self, now: float, *, is_stalled: bool) -> None:
        """End the requests whose deadline has passed.

        The engine also does this between two steps, but not while it hangs.

        Args:
            is_stalled: the worker hangs. Then a request that the worker has begun, but without output, expires too.
        """
        for live in self._live():
            if live.is_expired(now) and not live.has_failed and (is_stalled or not live.is_scheduled):
                live.fail(self._queue_timeout(live, has_begun=live.is_scheduled))

    def wake_silent_requests(self, *, since_seconds: float) -> None:
        """Wake the delivery of requests to which nothing was sent since that time, for a keep-alive."""
        for request in self._requests:
            if request.last_sent_seconds < since_seconds:
                request.poke()

    def _live(self) -> list[InflightRequest | InflightQuery]:
        return [*self._requests, *self._looks.values()]

    def _receive_start(self, started: Started) -> None:
        """Note that the worker is about to compute a choice or a look."""
        entry, look = self._choices.get(started.uid), self._looks.get(started.uid)
        if entry is not None and started.attempt == entry[1].submit.attempt:
            entry[1].is_scheduled = True
        elif look is not None and started.attempt == look.look.attempt:
            look.is_scheduled = True
        else:
            return  # from a dead worker, or for a request that has ended
        self._detector.record_start(started.uid)

    def _receive_look(self, looked: AttentionResult) -> None:
        live = self._looks.get(looked.uid)
        if live is None:
            return
        live.set_answer(looked)
        self._detector.forget(looked.uid)
        self._release()

    def _receive_delta(self, delta: TokenDelta) -> InflightRequest | None:
        """Store a delta with its request. Returns the request, None if the delta was dropped."""
        entry = self._choices.get(delta.uid)
        if entry is None:
            self._on_late(len(delta.token_ids))  # computed before the worker read the cancellation
            return None
        request, choice = entry
        if delta.attempt != choice.submit.attempt:
            return None  # from a dead worker
        has_failed = delta.finish is not None and delta.finish.reason in _FAILURES
        # A failed step may have sampled tokens that were never sent.
        if delta.index != len(choice.token_ids) and not has_failed:
            logger.error(
                "request %s: delta at token index %d, expected %d; the request fails",
                delta.uid,
                delta.index,
                len(choice.token_ids),
            )
            request.fail(EngineFailed("the engine's output arrived out of order; try again", retry=True))
            return None
        if not choice.has_started:
            choice.has_started = True
            self._admission.started(choice.num_counted_tokens, choice.submit.tenant)
        choice.token_ids.extend(delta.token_ids)
        # If the list is complete, another sample of the prompt has filled it.
        if delta.prompt_logprobs and len(choice.prompt_logprobs) < choice.num_prompt_tokens:
            choice.prompt_logprobs.extend(delta.prompt_logprobs)
        if not self._detector.is_empty:
            self._record_progress(request, choice, is_over=delta.finish is not None)
        if delta.finish is not None:
            choice.finish = delta.finish
            self._forget(choice)
            if has_failed:
                request.fail(self._failure(request, choice, delta.finish))
                return None
        if not request.push(choice, delta):
            self.close(request)
        return request

    def _replay(self, hello: WorkerReady) -> None:
        """Resubmit all unfinished work to a new worker. At the first start (epoch 0) there is nothing to resubmit."""
        self._on_worker_ready(hello)
        self._admission.limit_running(None)
        if hello.epoch == 0:
            return
        if (uid := self._detector.record_crash()) is not None:
            self._fail_poison(uid)
        again: list[Work] = []
        for request in self._requests:
            waiting = [choice for choice in request.choices if choice.submit.uid in self._choices]
            if request.has_failed:
                for choice in waiting:
                    self._detector.forget(choice.submit.uid)
            elif waiting:
                again += [_retry(request, choice) for choice in waiting]
                self._on_replay("resubmitted")
        for uid, live in self._looks.items():
            if live.has_failed or live.is_answered:
                self._detector.forget(uid)
            else:
                again.append(live.retry())
        self._submit(again)
        self._release()

    def _fail_poison(self, uid: str) -> None:
        """Fail the poison request, which kills workers."""
        live = self._looks[uid] if uid in self._looks else self._choices[uid][0]
        logger.error("a request (%s, %s) ends with an error: it killed several workers", live.terms.tenant, uid)
        live.fail(EngineFailed("the worker died repeatedly on this request", retry=False))
        self._on_replay("gave_up")

    def _record_progress(self, request: InflightRequest, choice: Choice, *, is_over: bool) -> None:
        """Remove a choice's strikes. Take it off the worker if the next poison candidate must now run alone."""
        if self._detector.record_progress(choice.submit.uid) and not is_over:
            self._send([Cancel(uid=choice.submit.uid)])
            self._submit([_retry(request, choice)])
        self._release()

    def _submit(self, work: Sequence[Work]) -> None:
        """Send work to the worker, or hold it while a poison candidate runs alone."""
        if admitted := self._detector.admit(work):
            self._send(admitted)

    def _release(self) -> None:
        """Send held work that no longer has to wait."""
        if released := self._detector.release():
            self._send(released)

    def _failure(self, request: InflightRequest, choice: Choice, finish: Finish) -> ApiError:
        """Return the error of a sequence that could not be finished."""
        if finish.reason is not FinishReason.ABORT or choice.token_ids:
            return _failure(choice, finish)
        # A cancelled sequence sends no event, so the abort means that the deadline has passed.
        return self._queue_timeout(request, has_begun=False)

    def _queue_timeout(self, live: InflightRequest | InflightQuery, *, has_begun: bool) -> QueueTimeout:
        counts = [choice.num_counted_tokens for choice in live.choices] if isinstance(live, InflightRequest) else [1]
        verb = "answered" if has_begun else "begun"
        return QueueTimeout(
            f"the request was not {verb} within its time, {live.terms.timeout_seconds:g} s; try again later",
            retry_after_seconds=self._admission.retry_after(counts, live.terms),
        )

    def _forget(self, choice: Choice) -> None:
        self._drop(choice)
        self._release()

    def _drop(self, choice: Choice) -> None:
        del self._choices[choice.submit.uid]
        self._detector.forget(choice.submit.uid)
        if not choice.has_started:
            choice.has_started = True
            self._admission.started(choice.num_counted_tokens, choice.submit.tenant)
        self._admission.ended(choice.submit.tenant)


def _retry(request: InflightRequest, choice: Choice) -> Submit:
    """Return the choice's next attempt, which continues after the tokens received so far.

    If the prompt's logprobs are incomplete, each sample of the prompt requests them again, because any sample may run
    first.
    """
    num_prompt_logprobs = None
    if len(choice.prompt_logprobs) < choice.num_prompt_tokens:
        choice.prompt_logprobs.clear()
        first = next(each for each in request.choices if each.prompt_index == choice.prompt_index)
        num_prompt_logprobs = first.submit.params.prompt_logprobs
    choice.is_scheduled = choice.has_started
    choice.submit = msgspec.structs.replace(
        choice.submit,
        attempt=choice.submit.attempt + 1,
        prior_token_ids=tuple(choice.token_ids),
        params=dataclasses.replace(choice.submit.params, prompt_logprobs=num_prompt_logprobs),
        deadline_seconds=None if choice.has_started else choice.submit.deadline_seconds,
    )
    return choice.submit


def _failure(choice: Choice, finish: Finish) -> ApiError:
    """Return the error of a sequence that could not be finished."""
    if finish.reason is FinishReason.REFUSED:
        params = choice.submit.params
        named = {"allowed_token_ids": params.allowed_token_ids, "bad_words": params.bad_word_ids}
        param = next((name for name, ids in named.items() if ids), choice.grammar_param)
        return InvalidRequest(
            finish.error or "the request's token rules or grammar allow no next token; relax them", param=param
        )
    if finish.error == NON_FINITE:
        return EngineFailed(NON_FINITE, retry=False)
    return EngineFailed("the engine failed on this request", retry=True)
