"""A request between admission and the end of its response: its completions and what has arrived of them; or a look."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from service.backlog import MAX_BACKLOG_BYTES, kept_bytes
from service.errors import ApiError, ClientGone
from service.messages import Finish, Look, Looked, Submit, TokenDelta, TokenLogprob
from service.queue_terms import QueueTerms

logger = logging.getLogger(__name__)

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
    is_scheduled: the worker has begun to compute it.
    has_started: its first event has come.
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
    is_scheduled: bool = False
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


# What has arrived, in order, and of which choice.
News: TypeAlias = list[tuple[Choice, TokenDelta]]
# Makes bytes of news. Returns what sends them; None where it took nothing, and the task has to.
AtOnce: TypeAlias = Callable[[News], Callable[[], None] | None]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request, and who waits for it: the task that delivers its answer."""

    choices: list[Choice]
    arrival_seconds: float
    terms: QueueTerms = field(default_factory=QueueTerms)
    last_sent_seconds: float = 0.0
    _arrived: News = field(default_factory=list)
    _num_kept_bytes: int = 0  # of what has arrived and was not taken
    _failure: ApiError | None = None
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _at_once: AtOnce | None = None  # while the task waits

    async def next_deltas(self, at_once: AtOnce | None = None) -> News:
        """Wait for news and return all of it. Empty when `poke` ended the wait.

        Args:
            at_once: what it takes while this waits is delivered without waking the task.

        Raises:
            ApiError: the request has failed, or its client has gone; what came before was returned first.
        """
        self._at_once = at_once
        try:
            await self._wake.wait()
        finally:
            self._at_once = None
        self._wake.clear()
        if self._failure is not None and (not self._arrived or isinstance(self._failure, ClientGone)):
            raise self._failure
        arrived, self._arrived, self._num_kept_bytes = self._arrived, [], 0
        if self._failure is not None:
            self._wake.set()
        return arrived

    def push(self, choice: Choice, delta: TokenDelta) -> bool:
        """Keep news until `tell`. False where nobody takes it: the client is too far behind, and given up."""
        if self._num_kept_bytes > MAX_BACKLOG_BYTES:
            self._arrived.clear()
            self.fail(ClientGone("the client reads too slowly"))
            return False
        self._num_kept_bytes += kept_bytes(delta)
        self._arrived.append((choice, delta))
        return True

    def tell(self) -> Callable[[], None] | None:
        """Have what was pushed delivered, at once where that is possible: then this returns what sends it.

        Raises nothing: others are told next.
        """
        send = None
        if self._at_once is not None and self._arrived and not self._wake.is_set():
            try:
                send = self._at_once(self._arrived)
            except Exception:
                logger.exception("an answer could not be delivered")
                self._arrived.clear()
                self.fail(ApiError("internal error"))
        if send is None:
            self._wake.set()
        else:
            self._arrived, self._num_kept_bytes = [], 0
        return send

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
        """Whether it ends with an error, sent or not yet."""
        return self._failure is not None

    @property
    def is_scheduled(self) -> bool:
        """Whether the worker has begun to compute one of its choices."""
        return any(choice.is_scheduled for choice in self.choices)

    def is_expired(self, now: float) -> bool:
        """Whether its time is over, and nothing of its answer has come."""
        deadline = self.terms.deadline(self.arrival_seconds)
        return deadline is not None and deadline < now and not any(choice.has_started for choice in self.choices)


@dataclass(slots=True, eq=False)
class LiveLook:
    """An attention look that is under way, and the future that its route waits for."""

    look: Look
    arrival_seconds: float
    terms: QueueTerms
    answer: "asyncio.Future[Looked]"
    is_scheduled: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether the worker's answer has come."""
        return self.answer.done() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether it ends with an error, or its client has gone."""
        return self.answer.cancelled() or (self.answer.done() and self.answer.exception() is not None)

    def is_expired(self, now: float) -> bool:
        """Whether its time is over without an answer."""
        deadline = self.terms.deadline(self.arrival_seconds)
        return deadline is not None and deadline < now and not self.is_answered

    def set_answer(self, looked: Looked) -> None:
        """Wake the route with the worker's answer. The first ending counts."""
        if not self.answer.done():
            self.answer.set_result(looked)

    def fail(self, error: ApiError) -> None:
        """Wake the route with an error. The first ending counts."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def retry(self) -> Look:
        """Make the look's next attempt."""
        self.is_scheduled = False
        self.look = msgspec.structs.replace(self.look, attempt=self.look.attempt + 1)
        return self.look
