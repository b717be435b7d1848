"""Every unfinished request of this API process: what was submitted, what has come back, and the task that waits.

The journal is what survives a worker: a worker that says hello is empty, and gets everything unfinished again with
the tokens its clients already have. Nothing here may raise into LitServe's reader task, which would stop for good.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import msgspec

from service.admission import Admission
from service.errors import ApiError, EngineFailed, InvalidRequest, QueueTimeout
from service.live_request import Choice, LiveLook, LiveRequest
from service.messages import (
    NON_FINITE,
    Cancel,
    Command,
    Event,
    Finish,
    FinishReason,
    Hello,
    Looked,
    RunningLimitChanged,
    Started,
    Submit,
    TokenDelta,
)
from service.poison_detector import PoisonRequestDetector, Work

logger = logging.getLogger(__name__)

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.REFUSED)


class Journal:
    """Owner of the live requests. One thread: the API process' event loop.

    Args:
        send: puts commands on the worker's queue, in order.
        admission: bounds what is live.
        on_hello: told of each worker that came up, before its requests are submitted again.
        on_replay: told the outcome of each request's resubmission: "resubmitted" or "gave_up".
        on_late: told how many tokens came for a sequence that nobody waits for any more.
    """

    def __init__(
        self,
        *,
        send: Callable[[Sequence[Command]], None],
        admission: Admission,
        on_hello: Callable[[Hello], None],
        on_replay: Callable[[str], None],
        on_late: Callable[[int], None],
    ) -> None:
        self._send = send
        self._admission = admission
        self._on_hello = on_hello
        self._on_replay = on_replay
        self._on_late = on_late
        self._choices: dict[str, tuple[LiveRequest, Choice]] = {}
        self._requests: dict[LiveRequest, None] = {}  # in order of arrival
        self._looks: dict[str, LiveLook] = {}  # in order of arrival
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

    def open(self, request: LiveRequest) -> None:
        """Admit a request and submit all its choices at once.

        Raises:
            Overloaded: there is no room, or it would wait too long. This, and what `send` raises, leaves nothing open.
        """
        terms = request.terms
        self._admission.admit([choice.num_counted_tokens for choice in request.choices], terms)
        # The first choice is the first to begin, and when one has begun, the others have all the time they need.
        deadlines = [terms.deadline(request.arrival_seconds), *[None] * (len(request.choices) - 1)]
        for choice, deadline in zip(request.choices, deadlines, strict=True):
            choice.submit = msgspec.structs.replace(
                choice.submit, owner=terms.owner, cache_namespace=terms.cache_namespace, deadline_seconds=deadline
            )
        self._requests[request] = None
        self._choices |= {choice.submit.uid: (request, choice) for choice in request.choices}
        try:
            self._submit([choice.submit for choice in request.choices])
        except BaseException:
            del self._requests[request]
            for choice in request.choices:
                self._drop(choice)  # of all, before anything else is sent that might fail as well
            raise

    def close(self, request: LiveRequest) -> int:
        """Forget a request, and cancel what of it is unfinished. Returns how many choices that is."""
        self._requests.pop(request, None)
        unfinished = [choice for choice in request.choices if choice.submit.uid in self._choices]
        for choice in unfinished:
            self._drop(choice)
        if unfinished:
            self._send([Cancel(uid=choice.submit.uid) for choice in unfinished])
            self._release()
        return len(unfinished)

    def open_look(self, live: LiveLook) -> None:
        """Submit an attention look. Call `close_look` once it is answered or given up."""
        self._looks[live.look.uid] = live
        try:
            self._submit([live.look])
        except BaseException:
            del self._looks[live.look.uid]
            self._detector.forget(live.look.uid)
            raise

    def close_look(self, live: LiveLook) -> None:
        """Forget a look, and cancel it if it is unanswered."""
        uid = live.look.uid
        del self._looks[uid]
        self._detector.forget(uid)
        if not live.is_answered:
            self._send([Cancel(uid=uid)])
        self._release()

    def receive(self, events: Sequence[Event]) -> None:
        """Distribute one message of a worker."""
        touched: dict[LiveRequest, None] = {}
        token_counts: list[int] = []
        for event in events:
            if isinstance(event, TokenDelta):
                token_counts.append(len(event.token_ids))
                if (request := self._receive_delta(event)) is not None:
                    touched[request] = None
            elif isinstance(event, Hello):
                self._replay(event)
            elif isinstance(event, RunningLimitChanged):
                self._admission.limit_running(event.max_num_running)
            elif isinstance(event, Started):
                self._receive_start(event)
            else:
                self._receive_look(event)
        # What the kernel does follows all that Python does: so each finds its code in the caches.
        for send in [request.tell() for request in touched]:
            if send is not None:
                send()
        self._admission.stepped(token_counts)

    def fail_all(self, error: ApiError) -> None:
        """End every live request."""
        for live in self._live():
            live.fail(error)

    def expire(self, now: float, *, is_stalled: bool) -> None:
        """End the requests that have waited longer than they may.

        The engine ends them itself between two steps, but not while it hangs.

        Args:
            is_stalled: the worker hangs. Then a request that it has begun and not answered expires, too.
        """
        for live in self._live():
            if live.is_expired(now) and not live.has_failed and (is_stalled or not live.is_scheduled):
                live.fail(self._queue_timeout(live, has_begun=live.is_scheduled))

    def poke_silent(self, *, since_seconds: float) -> None:
        """Wake the requests to which nothing was sent since that time."""
        for request in self._requests:
            if request.last_sent_seconds < since_seconds:
                request.poke()

    def _live(self) -> list[LiveRequest | LiveLook]:
        return [*self._requests, *self._looks.values()]

    def _receive_start(self, started: Started) -> None:
        """Note that the worker is about to compute a choice or a look."""
        entry, look = self._choices.get(started.uid), self._looks.get(started.uid)
        if entry is not None and started.attempt == entry[1].submit.attempt:
            entry[1].is_scheduled = True
        elif look is not None and started.attempt == look.look.attempt:
            look.is_scheduled = True
        else:
            return  # of a worker that died, or of a request that has ended
        self._detector.record_start(started.uid)

    def _receive_look(self, looked: Looked) -> None:
        live = self._looks.get(looked.uid)
        if live is None:
            return
        live.set_answer(looked)
        self._detector.forget(looked.uid)
        self._release()

    def _receive_delta(self, delta: TokenDelta) -> LiveRequest | None:
        """Returns the request that got news of it."""
        entry = self._choices.get(delta.uid)
        if entry is None:
            self._on_late(len(delta.token_ids))  # computed before its cancellation was read
            return None
        request, choice = entry
        if delta.attempt != choice.submit.attempt:
            return None  # from a worker that died
        has_failed = delta.finish is not None and delta.finish.reason in _FAILURES
        # A step that failed may have drawn tokens that nobody was told.
        if delta.index != len(choice.token_ids) and not has_failed:
            logger.error("%s: event at token %d, %d expected", delta.uid, delta.index, len(choice.token_ids))
            request.fail(EngineFailed("the engine's answer came out of order", retry=True))
            return None
        if not choice.has_started:
            choice.has_started = True
            self._admission.started(choice.num_counted_tokens, choice.submit.owner, choice)
        choice.token_ids.extend(delta.token_ids)
        # Of those that are whole, another sample has brought them.
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

    def _replay(self, hello: Hello) -> None:
        """A worker is up and empty. At the first start (epoch 0) nothing can have been lost."""
        self._on_hello(hello)
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
        """End the request that kills workers."""
        live = self._looks[uid] if uid in self._looks else self._choices[uid][0]
        logger.error("a request (%s, %s) ends with an error: it killed worker after worker", live.terms.owner, uid)
        live.fail(EngineFailed("the worker died repeatedly on this request", retry=False))
        self._on_replay("gave_up")

    def _record_progress(self, request: LiveRequest, choice: Choice, *, is_over: bool) -> None:
        """Remove a choice's strikes. Where the next suspect is to be tried, it leaves the worker until that is over."""
        if self._detector.record_progress(choice.submit.uid) and not is_over:
            self._send([Cancel(uid=choice.submit.uid)])
            self._submit([_retry(request, choice)])
        self._release()

    def _submit(self, work: Sequence[Work]) -> None:
        """Give work to the worker, or hold it while a suspect is tried."""
        if admitted := self._detector.admit(work):
            self._send(admitted)

    def _release(self) -> None:
        """Submit held work that need not wait any longer."""
        if released := self._detector.release():
            self._send(released)

    def _failure(self, request: LiveRequest, choice: Choice, finish: Finish) -> ApiError:
        """What a client is told of a sequence that could not be finished."""
        if finish.reason is not FinishReason.ABORT or choice.token_ids:
            return _failure(choice, finish)
        # A cancelled sequence sends no event, so this one's deadline has passed.
        return self._queue_timeout(request, has_begun=False)

    def _queue_timeout(self, live: LiveRequest | LiveLook, *, has_begun: bool) -> QueueTimeout:
        counts = [choice.num_counted_tokens for choice in live.choices] if isinstance(live, LiveRequest) else [1]
        what = "answered" if has_begun else "begun"
        return QueueTimeout(
            f"the request was not {what} within its time, {live.terms.timeout_seconds:g} s; try again later",
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
            self._admission.started(choice.num_counted_tokens, choice.submit.owner)
        self._admission.ended(choice.submit.owner, choice)


def _retry(request: LiveRequest, choice: Choice) -> Submit:
    """Make the choice's next attempt, which goes on from the tokens that are already here.

    Of several samples of a prompt it is unknown which comes first: each scores a prompt whose scores are incomplete.
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
    """What a client is told of a sequence that could not be finished."""
    if finish.reason is FinishReason.REFUSED:
        params = choice.submit.params
        named = {"allowed_token_ids": params.allowed_token_ids, "bad_words": params.bad_word_ids}
        param = next((name for name, ids in named.items() if ids), choice.grammar_param)
        return InvalidRequest(finish.error or "no token may come next", param=param)
    if finish.error == NON_FINITE:
        return EngineFailed(NON_FINITE, retry=False)
    return EngineFailed("the engine failed on this request", retry=True)
