"""State of an admitted request until the end of its response: choices, and token deltas not yet delivered."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from service.admission.controller import QueuePolicy
from service.ipc.messages import AttentionQuery, AttentionResult, Finish, Submit, TokenDelta, TokenLogprob
from service.protocol.errors import ApiError, ClientGone
from service.requests.engine_worker import EngineWorker

logger = logging.getLogger(__name__)

# Completion tokens that admission counts for a request without max_tokens. With the rest of a context of 131,072
# tokens, two such requests would fill the queue.
DEFAULT_COUNTED_TOKENS: Final = 1024
# Limit of the undelivered deltas and logprob entries of a request. A request whose client is further behind fails. A
# delta takes about 600 bytes, and a logprob entry up to 2,550 (20 alternatives), so at most about 21 MB.
MAX_BACKLOG: Final = 8192


@dataclass(slots=True, eq=False)
class Choice:
    """One completion of a request: the `index`th of the response, for the `prompt_index`th prompt.

    num_hidden_prompt_tokens: length of the prompt's beginning, in tokens, in which `prompt_text` leaves out special
        tokens.

    prompt_logprobs: one list, shared by all samples of a prompt. The first sample fills the list before the first token
        of another sample, because the engine serves equal priorities in arrival order.
    """

    index: int
    prompt_index: int
    prompt_text: str
    submit: Submit
    num_hidden_prompt_tokens: int = 0
    has_requested_length: bool = True  # the client set a maximum length; else `max_tokens` is the rest of the context
    grammar_param: str | None = None  # request field of the grammar
    num_prompt_logprobs: int | None = None  # alternatives per prompt token that the first sample requests
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    has_started: bool = False  # the first delta has arrived
    retry_seconds: tuple[float, ...] = ()  # times of the resubmissions to a worker
    begin_seconds: float | None = None  # time at which the worker of the first delta began to compute the choice
    first_delta_seconds: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submit.prompt_token_ids)

    @property
    def num_counted_tokens(self) -> int:
        """Number of tokens that admission counts: prompt plus max_tokens, which counts 1,024 at most if unset."""
        max_tokens = self.submit.params.max_tokens
        counted = max_tokens if self.has_requested_length else min(max_tokens, DEFAULT_COUNTED_TOKENS)
        return self.num_prompt_tokens + counted

    def add(self, delta: TokenDelta) -> None:
        if not self.has_started:
            self.has_started, self.first_delta_seconds = True, time.monotonic()
        self.token_ids.extend(delta.token_ids)
        # If the list is complete, another sample of the prompt has filled it.
        if delta.prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt_tokens:
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.finish = delta.finish

    def over_all_attempts(self, finish: Finish) -> Finish:
        """Return the end of a resubmitted choice with times over all attempts, since a worker knows its own only."""
        arrival, begin, first = self.submit.arrival_seconds, self.begin_seconds, self.first_delta_seconds
        if begin is None or first is None:
            return finish
        end = arrival + finish.queue_seconds + finish.prefill_seconds + finish.decode_seconds
        return msgspec.structs.replace(
            finish,
            queue_seconds=begin - arrival,
            prefill_seconds=first - begin,
            decode_seconds=max(0.0, end - first),
        )

    def retry(self) -> None:
        """Prepare `submit` for another submission to a worker, which continues after the tokens received so far."""
        self.retry_seconds += (time.monotonic(),)
        # Each sample of a prompt requests incomplete prompt logprobs again, because any sample may run first.
        num_prompt_logprobs = None
        if len(self.prompt_logprobs) < self.num_prompt_tokens:
            self.prompt_logprobs.clear()
            num_prompt_logprobs = self.num_prompt_logprobs
        self.submit = msgspec.structs.replace(
            self.submit,
            attempt=self.submit.attempt + 1,
            prior_token_ids=tuple(self.token_ids),
            params=dataclasses.replace(self.submit.params, prompt_logprobs=num_prompt_logprobs),
            deadline_seconds=None if self.has_started else self.submit.deadline_seconds,
        )


Deltas: TypeAlias = list[tuple[Choice, TokenDelta]]  # in order of arrival
# Encodes deltas. Returns a function that sends the bytes; None if the task must deliver the deltas instead.
DirectWriter: TypeAlias = Callable[[Deltas], Callable[[], None] | None]


@dataclass(slots=True, eq=False)
class InflightRequest:
    """Unfinished request: choices, undelivered deltas, and the wake-up of the task that sends the response."""

    choices: list[Choice]
    arrival_seconds: float
    terms: QueuePolicy = field(default_factory=QueuePolicy)
    last_sent_seconds: float = float("inf")  # time of the last bytes sent; infinity: a response without keep-alives
    worker: EngineWorker = field(init=False)  # set by the engine client
    failure: ApiError | None = None  # error that ends the request, even if the error is not sent yet
    wake: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # wakes the task of the response; without deltas it sends a keep-alive
    _arrived: Deltas = field(default_factory=list)
    _backlog: int = 0  # deltas and logprob entries in `_arrived`
    _at_once: DirectWriter | None = None  # set while the task waits

    @property
    def adapter(self) -> str:
        """Key of the LoRA adapter of all choices; empty for the base model."""
        return self.choices[0].submit.adapter

    def apply_terms(self) -> None:
        """Write the queueing terms into each choice's `Submit`, and the deadline into the first, which begins first."""
        terms = self.terms
        prompt_logprobs: dict[int, int | None] = {}
        for number, choice in enumerate(self.choices):
            choice.num_prompt_logprobs = prompt_logprobs.setdefault(
                choice.prompt_index, choice.submit.params.prompt_logprobs
            )
            choice.submit = msgspec.structs.replace(
                choice.submit,
                tenant=terms.tenant,
                cache_namespace=terms.cache_namespace,
                deadline_seconds=None if number else terms.deadline(self.arrival_seconds),
            )

    async def next_deltas(self, at_once: DirectWriter | None = None) -> Deltas:
        """Wait for token deltas and return all that have arrived; an empty list if `wake` ended the wait.

        at_once: delivers deltas that arrive during the wait, without waking the task.
        Raises an `ApiError`: the client reads too slowly, or the request has failed and all its deltas were returned.
        """
        self._at_once = at_once
        try:
            await self.wake.wait()
        finally:
            self._at_once = None
        self.wake.clear()
        if self.failure is not None and (not self._arrived or isinstance(self.failure, ClientGone)):
            raise self.failure
        arrived, self._arrived, self._backlog = self._arrived, [], 0
        if self.failure is not None:
            self.wake.set()
        return arrived

    def push(self, choice: Choice, delta: TokenDelta) -> bool:
        """Buffer a delta until `deliver`. If the client reads too slowly, fail the request and return False."""
        if self._backlog > MAX_BACKLOG:
            self._arrived.clear()
            self.fail(ClientGone("the client reads the response too slowly"))
            return False
        self._backlog += 1
        if delta.logprobs or delta.prompt_logprobs:
            self._backlog += len(delta.logprobs or ()) + len(delta.prompt_logprobs or ())
        self._arrived.append((choice, delta))
        return True

    def deliver(self) -> Callable[[], None] | None:
        """Return a function that sends the buffered deltas; None: the response's task was woken to send the deltas."""
        send = None
        if self._at_once is not None and self._arrived and not self.wake.is_set():
            try:
                send = self._at_once(self._arrived)
            except Exception:  # the caller delivers to further requests next
                logger.exception("tokens could not be written to a response; the request fails")
                self._arrived.clear()
                self.fail(ApiError("internal error"))
        if send is None:
            self.wake.set()
        else:
            self._arrived, self._backlog = [], 0
        return send

    def fail(self, error: ApiError) -> None:
        """End the request with an error. After the first call, further calls have no effect."""
        if self.failure is None:
            self.failure = error
            self.wake.set()

    @property
    def has_failed(self) -> bool:
        """True if the request ends with an error, even if the error is not sent yet."""
        return self.failure is not None

    @property
    def has_started(self) -> bool:
        return any(choice.has_started for choice in self.choices)


@dataclass(slots=True, eq=False)
class InflightQuery:
    """Unfinished attention query, and the future that the query's route waits for."""

    submit: AttentionQuery
    arrival_seconds: float
    terms: QueuePolicy
    answer: "asyncio.Future[AttentionResult]"
    worker: EngineWorker = field(init=False)  # set by the engine client
    adapter = ""  # attention is computed for the base model

    @property
    def choices(self) -> "list[InflightQuery]":
        return [self]

    @property
    def has_failed(self) -> bool:
        """True if the query ended with an error, or its client disconnected."""
        return self.answer.cancelled() or (self.answer.done() and self.answer.exception() is not None)

    @property
    def has_started(self) -> bool:
        """True if the query has ended in any way. A query has no first token, so it counts as waiting until it ends."""
        return self.answer.done()

    def set_answer(self, result: AttentionResult) -> None:
        """Wake the query's route with the worker's result, unless the query has ended."""
        if not self.answer.done():
            self.answer.set_result(result)

    def fail(self, error: ApiError) -> None:
        """Wake the query's route with an error, unless the query has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def retry(self) -> None:
        self.submit = msgspec.structs.replace(self.submit, attempt=self.submit.attempt + 1)
