"""Every unfinished request of this API process: what was submitted, what has come back, and who waits for it.

The journal is what survives a worker: a worker that says hello is empty, and gets everything unfinished again with
the tokens its clients already have. Nothing here may raise into LitServe's reader task, which would stop for good.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from service.admission import Admission
from service.errors import ApiError, EngineFailed, InvalidRequest, QueueTimeout
from service.live_request import Choice, LiveRequest
from service.messages import (
    Cancel,
    Command,
    Event,
    Finish,
    FinishReason,
    Hello,
    Started,
    Submit,
    TokenDelta,
)
from service.suspects import GUILTY, Suspects

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
        self._suspects = Suspects()
        self.last_event_seconds = time.monotonic()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_choices(self) -> int:
        return len(self._choices)

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
        if not self._choices:
            self.last_event_seconds = time.monotonic()
        self._requests[request] = None
        self._choices |= {choice.submit.uid: (request, choice) for choice in request.choices}
        try:
            self._give([c.submit for c in request.choices if not self._suspects.keeps_back(c.submit.uid)])
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
            self._forget(choice)
        if unfinished:
            self._send([Cancel(uid=choice.submit.uid) for choice in unfinished])
        return len(unfinished)

    def receive(self, events: Sequence[Event]) -> None:
        """Distribute one message of a worker."""
        self.last_event_seconds = time.monotonic()
        touched: dict[LiveRequest, None] = {}
        token_counts: list[int] = []
        for event in events:
            if isinstance(event, TokenDelta):
                token_counts.append(len(event.token_ids))
                if (request := self._receive_delta(event)) is not None:
                    touched[request] = None
            elif isinstance(event, Hello):
                self._replay(event)
            elif isinstance(event, Started) and (
                (entry := self._choices.get(event.uid)) is not None and event.attempt == entry[1].submit.attempt
            ):
                self._suspects.start(event.uid)
        # What the kernel does follows all that Python does: so each finds its code in the caches.
        for send in [request.tell() for request in touched]:
            if send is not None:
                send()
        self._admission.stepped(token_counts)

    def fail_all(self, error: ApiError) -> None:
        """End every live request."""
        for request in self._requests:
            request.fail(error)

    def poke_silent(self, *, since_seconds: float) -> None:
        """Wake the requests to which nothing was sent since that time."""
        for request in self._requests:
            if request.last_sent_seconds < since_seconds:
                request.poke()

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
        if not self._suspects.are_none:
            self._suspects.clear(delta.uid)
            self._release()
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
        if hello.epoch == 0:
            return
        self._end_guilty(self._suspects.strike())
        resubmitted: list[Submit] = []
        for request in self._requests:
            waiting = [choice for choice in request.choices if choice.submit.uid in self._choices]
            if request.has_failed:
                for choice in waiting:
                    self._suspects.clear(choice.submit.uid)
            if not waiting or request.has_failed:
                continue
            scored = {c.prompt_index: c.submit.params.prompt_logprobs for c in reversed(request.choices)}
            for choice in waiting:
                choice.submit = _next_attempt(choice, scored[choice.prompt_index])
                if not self._suspects.keeps_back(choice.submit.uid, has_begun=choice.has_started):
                    resubmitted.append(choice.submit)
            self._on_replay("resubmitted")
        self._give(resubmitted)
        self._release()

    def _end_guilty(self, suspects: dict[str, int]) -> None:
        """End the request that killed the worker, once that is known."""
        requests = {self._choices[uid][0] for uid in suspects}
        if len(requests) == 1 and max(suspects.values()) >= GUILTY:
            guilty = requests.pop()
            whose, uids = guilty.terms.owner, ", ".join(suspects)
            logger.error("a request (%s, %s) ends with an error: it killed worker after worker", whose, uids)
            guilty.fail(EngineFailed("the worker died repeatedly on this request", retry=False))
            self._on_replay("gave_up")

    def _release(self) -> None:
        """Submit what has waited for a suspect."""
        self._give([self._choices[uid][1].submit for uid in self._suspects.released()])

    def _give(self, submits: Sequence[Submit]) -> None:
        if submits:
            self._send(submits)

    def _failure(self, request: LiveRequest, choice: Choice, finish: Finish) -> ApiError:
        """What a client is told of a sequence that could not be finished."""
        if finish.reason is not FinishReason.ABORT or choice.token_ids:
            return _failure(choice, finish)
        # Nothing is told of a sequence that is cancelled: this one's time has passed.
        counts = [choice.num_counted_tokens for choice in request.choices]
        return QueueTimeout(
            f"the request was not begun within its time, {request.terms.timeout_seconds:g} s; try again later",
            retry_after_seconds=self._admission.retry_after(counts, request.terms),
        )

    def _forget(self, choice: Choice) -> None:
        may_release = not self._suspects.are_none
        self._drop(choice)
        if may_release:
            self._release()

    def _drop(self, choice: Choice) -> None:
        del self._choices[choice.submit.uid]
        self._suspects.clear(choice.submit.uid)
        if not choice.has_started:
            choice.has_started = True
            self._admission.started(choice.num_counted_tokens, choice.submit.owner)
        self._admission.ended(choice.submit.owner, choice)


def _next_attempt(choice: Choice, num_prompt_logprobs: int | None) -> Submit:
    """The same work after a worker's death, going on from the tokens that are already here.

    `num_prompt_logprobs`: what the first sample of its prompt was asked for. Who comes back first is not known: each
    scores a prompt whose scores are not here.
    """
    if len(choice.prompt_logprobs) < choice.num_prompt_tokens:
        choice.prompt_logprobs.clear()  # came in part: all of it again
    else:
        num_prompt_logprobs = None
    params = dataclasses.replace(choice.submit.params, prompt_logprobs=num_prompt_logprobs)
    return msgspec.structs.replace(
        choice.submit,
        attempt=choice.submit.attempt + 1,
        prior_token_ids=tuple(choice.token_ids),
        params=params,
        deadline_seconds=None if choice.has_started else choice.submit.deadline_seconds,
    )


def _failure(choice: Choice, finish: Finish) -> ApiError:
    """What a client is told of a sequence that could not be finished."""
    if finish.reason is FinishReason.REFUSED:
        params = choice.submit.params
        named = {"allowed_token_ids": params.allowed_token_ids, "bad_words": params.bad_word_ids}
        param = next((name for name, ids in named.items() if ids), choice.grammar_param)
        return InvalidRequest(finish.error or "no token may come next", param=param)
    return EngineFailed("the engine failed on this request", retry=True)
