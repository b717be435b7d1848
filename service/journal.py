"""Every unfinished request of this API process: what was submitted, what has come back, and who waits for it.

The journal is what survives a worker: a worker that says hello is empty, and gets everything unfinished again with
the tokens its clients already have. Nothing here may raise into LitServe's reader task, which would stop for good.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from service.admission import Admission
from service.backlog import MAX_BACKLOG_BYTES, kept_bytes
from service.errors import ApiError, ClientGone, EngineFailed, InvalidRequest, QueueTimeout
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
    TokenLogprob,
)
from service.queue_terms import QueueTerms
from service.suspects import GUILTY, Suspects

logger = logging.getLogger(__name__)

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.REFUSED)

# What an answer of no asked length counts as while it waits. It may fill the context, but where that is 131,072 tokens
# two such requests would be a full queue.
UNASKED_TOKENS = 1024


@dataclass(slots=True, eq=False)
class Choice:
    """One completion of a request. `index` is its place in the answer, `prompt_index` its prompt's.

    prompt_logprobs: the prompt's scores, one list for all its samples: the first of them brings these, no later than
        another brings its first token, for the engine serves equals in the order in which they came.
    has_asked_length: the client said how long it may get; else `max_tokens` is what the context leaves.
    grammar_param: the field of the request that its grammar is from.
    """

    index: int
    prompt_index: int
    prompt_text: str
    submit: Submit
    has_asked_length: bool = True
    grammar_param: str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    has_started: bool = False
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.prompt_token_ids)

    @property
    def num_counted_tokens(self) -> int:
        """What admission counts: the most this sequence can come to, or is likely to where nobody asked for more."""
        max_tokens = self.submit.params.max_tokens
        return self.num_prompt_tokens + (max_tokens if self.has_asked_length else min(max_tokens, UNASKED_TOKENS))

    @property
    def num_remaining_tokens(self) -> int:
        return max(0, self.submit.params.max_tokens - len(self.token_ids))


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between admission and the end of its response."""

    choices: list[Choice]
    arrival_seconds: float
    terms: QueueTerms = field(default_factory=QueueTerms)
    last_sent_seconds: float = 0.0
    _arrived: list[tuple[Choice, TokenDelta]] = field(default_factory=list)
    _num_kept_bytes: int = 0  # of what has arrived and was not taken
    _failure: ApiError | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_deltas(self) -> list[tuple[Choice, TokenDelta]]:
        """Wait for news and return all of it. Empty when `poke` ended the wait.

        Raises:
            ApiError: the request has failed, or its client has gone; what came before was returned first.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None and (not self._arrived or isinstance(self._failure, ClientGone)):
            raise self._failure
        arrived, self._arrived, self._num_kept_bytes = self._arrived, [], 0
        if self._failure is not None:
            self._wake.set()
        return arrived

    def push(self, choice: Choice, delta: TokenDelta) -> bool:
        """Hand over news. False where nobody takes it: the client is too far behind, and given up."""
        if self._num_kept_bytes > MAX_BACKLOG_BYTES:
            self._arrived.clear()
            self.fail(ClientGone("the client reads too slowly"))
            return False
        self._num_kept_bytes += kept_bytes(delta)
        self._arrived.append((choice, delta))
        self._wake.set()
        return True

    def fail(self, error: ApiError) -> None:
        """End the request. The first failure counts."""
        if self._failure is None:
            self._failure = error
            self._wake.set()

    def poke(self) -> None:
        """End a silent wait, for a sign of life to the client."""
        self._wake.set()

    @property
    def has_failed(self) -> bool:
        """Whether it ends with an error, told or not yet."""
        return self._failure is not None


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
            Overloaded: there is no room, or it would wait too long.
        """
        terms = request.terms
        self._admission.admit([choice.num_counted_tokens for choice in request.choices], terms)
        # The first choice is the first to begin, and when one has begun, the others have all the time they need.
        deadlines = [terms.deadline(request.arrival_seconds), *[None] * (len(request.choices) - 1)]
        for choice, deadline in zip(request.choices, deadlines, strict=True):
            choice.submit = msgspec.structs.replace(choice.submit, owner=terms.owner, deadline_seconds=deadline)
        if not self._choices:
            self.last_event_seconds = time.monotonic()
        self._requests[request] = None
        self._choices |= {choice.submit.uid: (request, choice) for choice in request.choices}
        self._give([c.submit for c in request.choices if not self._suspects.keeps_back(c.submit.uid)])

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
        for event in events:
            if isinstance(event, Hello):
                self._replay(event)
            elif isinstance(event, TokenDelta):
                self._receive_delta(event)
            elif isinstance(event, Started) and (
                (entry := self._choices.get(event.uid)) is not None and event.attempt == entry[1].submit.attempt
            ):
                self._suspects.start(event.uid)
        self._admission.stepped([len(event.token_ids) for event in events if isinstance(event, TokenDelta)])

    def fail_all(self, error: ApiError) -> None:
        """End every live request."""
        for request in self._requests:
            request.fail(error)

    def poke_silent(self, *, since_seconds: float) -> None:
        """Wake the requests to which nothing was sent since that time."""
        for request in self._requests:
            if request.last_sent_seconds < since_seconds:
                request.poke()

    def _receive_delta(self, delta: TokenDelta) -> None:
        entry = self._choices.get(delta.uid)
        if entry is None:
            self._on_late(len(delta.token_ids))  # computed before its cancellation was read
            return
        request, choice = entry
        if delta.attempt != choice.submit.attempt:
            return  # from a worker that died
        has_failed = delta.finish is not None and delta.finish.reason in _FAILURES
        # A step that failed may have drawn tokens that nobody was told.
        if delta.index != len(choice.token_ids) and not has_failed:
            logger.error("%s: event at token %d, %d expected", delta.uid, delta.index, len(choice.token_ids))
            request.fail(EngineFailed("the engine's answer came out of order", retry=True))
            return
        if not choice.has_started:
            choice.has_started = True
            self._admission.started(choice.num_counted_tokens, choice.submit.owner, choice)
        choice.token_ids.extend(delta.token_ids)
        if len(choice.prompt_logprobs) < choice.num_prompt_tokens:  # else another sample has brought them
            choice.prompt_logprobs.extend(delta.prompt_logprobs or ())
        self._clear(delta.uid)
        if delta.finish is not None:
            choice.finish = delta.finish
            self._forget(choice)
            if has_failed:
                request.fail(self._failure(request, choice, delta.finish))
                return
        if not request.push(choice, delta):
            self.close(request)

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

    def _clear(self, uid: str) -> None:
        """Nobody need suspect this choice any more."""
        self._suspects.clear(uid)
        self._release()

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
        del self._choices[choice.submit.uid]
        self._clear(choice.submit.uid)
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
