"""Who may wait, and what the others are told.

Three bounds: on sequences, on tokens, and on the time that a request would wait for a place. The last one keeps the
service fast for those it admits: a queue that never empties adds waiting and no throughput. It is not applied where
places are free, before a rate is known, or to an owner of whom nothing waits yet and who has less than an even share of
the places: it may wait as long as its timeout.

The next places are foreseen by what the answers that hold them have left (`service.places`), later ones by the rate at
which sequences have begun of late. A mean alone would be wrong by as much as endings come together by chance: by twice
and more for the next place or two, which are those that a short queue is about.

Room is shared among owners by dynamic thresholds (Choudhury and Hahne 1998, IEEE/ACM Trans. Networking 6(2)): an owner
may have at most four times as much as is left. One alone gets all that the settings say, and a quarter of that again
is there for others who come; two that flood get 5/9 of it each, and a third still finds room.

Who was told to come back, and does, finds a little more room than who comes for the first time.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.comebacks import Comebacks
from service.errors import Overloaded, WaitTooLong
from service.places import Answer, Places
from service.queue_terms import QueueTerms
from service.rates import Rate

# SDKs ignore a Retry-After of over two minutes.
_LONGEST_WAIT_SECONDS = 120.0
# Nobody is told less: a connection and a request take some milliseconds by themselves.
_SHORTEST_WAIT_SECONDS = 0.02
# How many times what is left an owner may have.
_THRESHOLD = 4
# The share of places above which starts are counted for the rate of a full service.
_FULL = 7 / 8
# A prompt takes about so many steps where nobody waits: the rest of the present one, and one of its own.
_PROMPT_STEPS = 2
# Told times are spread by up to this share, so that those who were refused together do not come back together.
_SPREAD = 0.25
# How much more room there is for who has come back, as a share.
_RETURN_BONUS = 0.25


@dataclass(slots=True)
class _Holding:
    """What one owner has here."""

    num_sequences: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request wants: so many sequences, of so many tokens together."""

    num_sequences: int
    num_tokens: int
    terms: QueueTerms


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Why there is no room, and after how many seconds there should be.

    wait_seconds: what the request would wait, where that is the reason.
    """

    seconds: float
    wait_seconds: float | None = None


class Admission:
    """Counts the sequences that were admitted and have not ended.

    A sequence waits until its first event from the engine. `num_tokens` is the most it can come to: prompt plus
    max_tokens.

    Args:
        observe_error: told how much later than promised room appeared, see `Comebacks`.
        draw: a number from 0 to 1, which spreads what is told.
    """

    def __init__(
        self,
        *,
        max_num_running: int,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        observe_error: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.max_num_sequences = max_num_running + max_waiting_requests
        self._most_running = self._max_num_running = max_num_running
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._draw = draw
        self._last_seconds = clock()
        self._finished, self._started_tokens = Rate(), Rate()
        self._started = Rate()  # sequences, while every place was wanted
        self._places = Places()
        self._comebacks: Comebacks[_Asked] = Comebacks(observe_error)
        self._holdings: dict[str, _Holding] = {}
        self.num_sequences = 0
        self.num_waiting_tokens = 0
        self._num_running = 0

    def admit(self, token_counts: list[int], terms: QueueTerms | None = None) -> None:
        """Let in the sequences of one request, all or none. An idle server admits any request.

        Raises:
            Overloaded: there is no room; says after how many seconds there should be.
            WaitTooLong: it would wait longer than it may; says the same.
        """
        terms = QueueTerms() if terms is None else terms
        self._advance()
        if terms.is_retry:
            self._comebacks.returned(terms.owner)
        asked = _Asked(len(token_counts), sum(token_counts), terms)
        if (shortage := self._shortage(asked)) is not None:
            raise self._refusal(asked, shortage)
        holding = self._holdings.setdefault(terms.owner, _Holding())
        holding.num_sequences += asked.num_sequences
        holding.num_waiting += asked.num_sequences
        holding.num_waiting_tokens += asked.num_tokens
        self.num_sequences += asked.num_sequences
        self.num_waiting_tokens += asked.num_tokens

    def refuse_hopeless(self, terms: QueueTerms) -> None:
        """Refuse a request of which nothing else is known, where not even the smallest would be let in.

        Raises:
            Overloaded, WaitTooLong: as `admit` does.
        """
        self._advance()
        asked = _Asked(1, 1, terms)
        if (shortage := self._shortage(asked)) is not None:
            if terms.is_retry:
                self._comebacks.returned(terms.owner)
            raise self._refusal(asked, shortage)

    def started(self, num_tokens: int, owner: str = "", answer: Answer | None = None) -> None:
        """A sequence of that many tokens waits no longer. `answer`: what it has become, where it holds a place."""
        self._advance(tokens=num_tokens, begun=1)
        self._num_running += 1
        if answer is not None:
            self._places.take(answer)
        holding = self._holdings[owner]
        holding.num_waiting -= 1
        holding.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens
        self._watch()

    def limit_running(self, max_num_running: int | None) -> None:
        """Take up the engine's limit on running sequences; None: the configured one."""
        most = self._most_running
        self._max_num_running = most if max_num_running is None else min(max_num_running, most)

    def stepped(self, token_counts: Sequence[int]) -> None:
        """The engine has told of a step, in which answers got so many tokens each. 0: it told something else."""
        if counts := [count for count in token_counts if count]:
            self._advance()
            self._places.step(sum(counts) / len(counts))

    def ended(self, owner: str = "", answer: Answer | None = None) -> None:
        """A sequence has left, whatever the reason, after it was `started`."""
        self._advance(sequences=1)
        self._num_running -= 1
        if answer is not None:
            self._places.leave(answer)
        self._holdings[owner].num_sequences -= 1
        if not self._holdings[owner].num_sequences:
            del self._holdings[owner]
        self.num_sequences -= 1
        self._watch()

    def retry_after(self, token_counts: list[int], terms: QueueTerms) -> float:
        """When a request that is sent away should come back, in seconds."""
        asked = _Asked(len(token_counts), sum(token_counts), terms)
        shortage = self._shortage(asked)
        return self._promise(asked, 0.0 if shortage is None else shortage.seconds)

    def _promise(self, asked: _Asked, seconds: float) -> float:
        """What is told to one who would find room in so many seconds if nobody else came back."""
        now, owner = self._clock(), asked.terms.owner
        if num_expected := self._comebacks.num_expected(owner, now):
            rate = self._started if self._started.is_known else self._finished
            seconds += rate.seconds_for(num_expected)
        seconds *= 1.0 + _SPREAD * self._draw()
        seconds = min(max(seconds, _SHORTEST_WAIT_SECONDS), _LONGEST_WAIT_SECONDS)
        self._comebacks.refused(owner, asked, num_sequences=asked.num_sequences, now=now, seconds=seconds)
        return seconds

    def _refusal(self, asked: _Asked, shortage: _Shortage) -> Overloaded:
        """What a request is told for which there is no room."""
        seconds = self._promise(asked, shortage.seconds)
        if shortage.wait_seconds is not None:
            return WaitTooLong(
                f"the request would wait about {shortage.wait_seconds:.1f} s, longer than "
                f"{asked.terms.patience_seconds:g} s; try again later, or allow more by timeout",
                retry_after_seconds=seconds,
            )
        return Overloaded(
            f"the server is full: {self.num_sequences} completions are running or waiting, try again later",
            retry_after_seconds=seconds,
        )

    def _shortage(self, asked: _Asked, num_before: float = 0.0) -> _Shortage | None:
        """What is missing for a request, beside so many sequences that come before it; None for nothing."""
        terms = asked.terms
        bonus = _RETURN_BONUS if terms.is_retry else 0.0
        holding = self._holdings.get(terms.owner, _Holding())
        num_sequences = asked.num_sequences + num_before
        excess = _excess(holding.num_sequences, self.num_sequences, num_sequences, self.max_num_sequences, bonus)
        excess_tokens = 0.0
        if self.num_waiting_tokens:
            tokens, limit = asked.num_tokens, self._max_waiting_tokens
            excess_tokens = _excess(holding.num_waiting_tokens, self.num_waiting_tokens, tokens, limit, bonus)
        if excess > 0 or excess_tokens > 0:
            return _Shortage(
                max(
                    self._finished.seconds_for(excess) if excess > 0 else 0.0,
                    self._started_tokens.seconds_for(excess_tokens) if excess_tokens > 0 else 0.0,
                )
            )
        if self.num_sequences + num_sequences <= self._max_num_running or not self._started.is_known:
            return None
        wait_seconds = self._wait_seconds(self._num_ahead(terms.owner, num_sequences) + num_sequences)
        # The first of an owner's line has only others' first ones before it. Whose the places are needs no such favour.
        num_owners = len(self._holdings) + (terms.owner not in self._holdings)
        is_served = holding.num_waiting or holding.num_sequences * num_owners >= self._max_num_running
        patience_seconds = terms.patience_seconds if is_served else terms.timeout_seconds
        patience_seconds *= 1.0 + bonus
        if wait_seconds <= patience_seconds:
            return None
        return _Shortage(wait_seconds - patience_seconds, wait_seconds)

    def _wait_seconds(self, num_starts: float) -> float:
        """When the last of so many sequences will have begun, but for the time that a prompt always takes."""
        num_seen = self._places.num_seen
        if not num_seen:
            return self._started.seconds_for(num_starts)
        # Of those that wait for a first token, so many have a place, or will at the next step.
        num_placed = min(num_starts, max(0, self._max_num_running - self._num_running))
        # The first endings free no slot where more sequences run than the limit allows by now.
        num_endings = num_starts - num_placed + max(0, self._num_running - self._max_num_running)
        num_foreseen = min(num_endings, num_seen)
        seconds = self._places.seconds_until_ended(num_foreseen)
        seconds += self._started.seconds_for(num_endings - num_foreseen)
        # Where prompts are what takes the time, places are free, and those who have them wait nevertheless.
        usual_seconds = self._places.seconds_for_tokens(_PROMPT_STEPS)
        return max(seconds, self._started.seconds_for(num_placed) - usual_seconds)

    def _num_ahead(self, owner: str, num_sequences: float) -> float:
        """Sequences that begin before the last of so many new ones of this owner: its own, and as many of each other,
        for the engine's queue serves owners in turn."""
        own = self._holdings.get(owner, _Holding()).num_waiting
        others = (min(o.num_waiting, own + num_sequences) for name, o in self._holdings.items() if name != owner)
        return own + sum(others)

    def _watch(self) -> None:
        """Room may have appeared for somebody who was refused."""

        self._comebacks.watch(self._clock(), lambda asked, num_before: self._shortage(asked, num_before) is None)

    def _advance(self, *, sequences: int = 0, tokens: int = 0, begun: int = 0) -> None:
        now = self._clock()
        seconds = now - self._last_seconds if self.num_sequences else 0.0
        self._last_seconds = now
        self._places.pass_time(seconds)
        self._finished.add(sequences, seconds)
        self._started_tokens.add(tokens, seconds)
        # With as much as that the places are as good as full; a place that is free for a moment does not interrupt it.
        if self.num_sequences >= _FULL * self._max_num_running:
            self._started.add(begun, seconds)


def _excess(held: float, total: float, asked: float, limit: float, bonus: float) -> float:
    """How much must leave before one who holds `held` of `total` may have `asked` more.

    Its share may be `_THRESHOLD` times what is left of a room that is larger than the limit by one part in
    `_THRESHOLD`: so one alone may have the limit. What leaves is taken to be its own, which counts in both.
    """
    room = math.floor(limit * (1.0 + bonus)) * (_THRESHOLD + 1)
    return (held + asked + _THRESHOLD * (total + asked) - room) / (_THRESHOLD + 1)
