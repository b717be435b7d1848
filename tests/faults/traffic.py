"""Clients that ask, one question after the other, until they are told to stop; and what became of each."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.oracle import CASUALTIES, Answer, Oracle, WrongAnswer
from tests.faults.questions import TEXT, Question
from tests.faults.wire import Moment, Reading, Reply, exchange, request_bytes
from tests.service.bad_requests import BAD_REQUESTS, CONTEXT, VOCABULARY

_SLOW, _DRIPPING = Reading(slow_seconds=0.02), Reading(num_drops=6)
# How a question is asked, and how often of a hundred times.
_MANNERS = {
    "read as it comes": 50,
    "read slowly": 8,
    "sent in drops": 8,
    "left": 14,
    "resumed by event id": 7,
    "repeated by key": 5,
    "bad request": 8,
}
# What the size of a vocabulary or a context decides would not be the same for every model.
_ONE_MODELS = ("context", "vocabulary", str(CONTEXT), str(VOCABULARY))
_BAD = [bad for bad in BAD_REQUESTS if not any(word in bad[2] for word in _ONE_MODELS) and len(bad[0]) < 10**6]


@dataclass(slots=True)
class Tally:
    """What became of all that was asked."""

    asked: Counter[str] = field(default_factory=Counter)  # by kind of question
    manners: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    num_tokens: int = 0
    longest_gap: float = 0.0
    casualties: list[tuple[float, float]] = field(default_factory=list)  # when each began and ended
    complaints: list[str] = field(default_factory=list)

    def saw(self, outcome: Answer | dict[str, Any], reply: Reply) -> None:
        """An answer that is right, or an honest error."""
        if isinstance(outcome, Answer):
            self.endings["the right answer"] += 1
            self.num_compared += 1
            self.num_tokens += outcome.num_tokens
            return
        self.endings[f"{reply.status if reply.status != 200 else 'in the stream'} {outcome['code']}"] += 1
        if outcome["code"] in CASUALTIES:
            self.casualties.append((reply.began, reply.ended))


class Traffic:
    """A crowd of clients of one server.

    Args:
        port: where it listens.
        asked: what they ask.
        oracle: knows the answers.
    """

    def __init__(self, port: int, asked: Sequence[Question], oracle: Oracle) -> None:
        self._port = port
        self._asked = asked
        self._oracle = oracle
        self.tally = Tally()

    async def learn(self, *, at_once: int) -> None:
        """Ask each question as a body, so many at a time: what the oracle goes by."""

        async def learn_one(number: int) -> None:
            question = self._asked[number]
            async with places:
                sent = request_bytes(question.path, question.body)
                self._oracle.learn(number, question, await exchange(self._port, sent, Reading(), random.Random()))

        places = asyncio.Semaphore(at_once)
        await asyncio.gather(*map(learn_one, range(len(self._asked))))

    async def check_all(self, choose: random.Random, *, at_once: int) -> None:
        """Ask each question once more, and have it answered."""

        async def check(number: int) -> None:
            async with places:
                before = self.tally.num_compared
                await self._ask(number, "read as it comes", choose)
                if self.tally.num_compared == before:
                    self.tally.complaints.append(f"question {number} was not answered though nothing was wrong")

        places = asyncio.Semaphore(at_once)
        if at_once == 1:
            for number in range(len(self._asked)):
                await check(number)
        else:
            await asyncio.gather(*map(check, range(len(self._asked))))

    async def flood(self, number: int, choose: random.Random) -> None:
        """So many at once."""
        manner = "in a flood"
        await asyncio.gather(*(self._ask(choose.randrange(len(self._asked)), manner, choose) for _ in range(number)))

    async def client(self, choose: random.Random, over: asyncio.Event) -> None:
        """One client, until it is over."""
        names, weights = list(_MANNERS), list(_MANNERS.values())
        while not over.is_set():
            (manner,) = choose.choices(names, weights)
            if manner == "bad request":
                await self._ask_badly(choose)
            else:
                await self._ask(choose.randrange(len(self._asked)), manner, choose)

    async def _ask(self, number: int, manner: str, choose: random.Random) -> None:
        question = self._asked[number]
        streams = question.may_stream and choose.random() < 0.6
        if manner == "resumed by event id" and not streams:
            manner = "repeated by key"
        if manner == "repeated by key" and question.path not in (TEXT, "/v1/chat/completions"):
            manner = "read as it comes"
        self.tally.asked[question.kind] += 1
        self.tally.manners[manner] += 1
        body = (
            {**question.body, "stream": True, "stream_options": {"include_usage": True}} if streams else question.body
        )
        try:
            match manner:
                case "left":
                    await self._leave(question.path, body, choose)
                    return
                case "resumed by event id":
                    reply = await self._resume(question.path, body, choose)
                case "repeated by key":
                    reply = await self._repeat(question.path, body, choose)
                case _:
                    reading = {"read slowly": _SLOW, "sent in drops": _DRIPPING}.get(manner, Reading())
                    reply = await exchange(self._port, request_bytes(question.path, body), reading, choose)
                    if manner == "read as it comes":
                        self.tally.longest_gap = max(self.tally.longest_gap, reply.longest_gap)
            outcome = self._oracle.judge(number, question, reply)
            self.tally.saw(outcome, reply)
            if not isinstance(outcome, Answer) and "retry-after-ms" in reply.headers and manner != "in a flood":
                await asyncio.sleep(min(1.0, int(reply.headers["retry-after-ms"]) / 1000))
        except (WrongAnswer, AssertionError, OSError, TimeoutError) as error:
            self._complain(
                f"{question.kind}, {manner}, {'stream' if streams else 'body'}: {type(error).__name__} {error}"
            )

    async def _leave(self, path: str, body: dict[str, Any], choose: random.Random) -> None:
        moment = choose.choice(list(Moment))
        await exchange(self._port, request_bytes(path, body), leaving(moment, choose), choose)
        self.tally.endings["the client left"] += 1

    async def _resume(self, path: str, body: dict[str, Any], choose: random.Random) -> Reply:
        """Leave a stream, once or twice, and come back for the rest of it. All of it, as one reply."""
        headers, told, reading = {"accept": "text/event-stream"}, b"", leaving(Moment.ANSWERED, choose)
        while True:
            reply = await exchange(self._port, request_bytes(path, body, headers), reading, choose)
            if reply.status != 200:
                return reply
            told += reply.content[: reply.content.rfind(b"\n\n") + 2]
            ids = [line[4:] for line in told.decode().split("\n") if line.startswith("id: ")]
            if reply.is_complete or not ids:
                break
            headers["last-event-id"] = ids[-1]
            reading = Reading()
        reply.content[:] = told
        return reply if reply.is_complete else await exchange(self._port, request_bytes(path, body), reading, choose)

    async def _repeat(self, path: str, body: dict[str, Any], choose: random.Random) -> Reply:
        """Leave, and ask again under the same key."""
        sent = request_bytes(path, body, {"idempotency-key": f"{choose.getrandbits(64):x}"})
        await exchange(self._port, sent, leaving(choose.choice([Moment.ASKED, Moment.ANSWERED]), choose), choose)
        return await exchange(self._port, sent, Reading(), choose)

    async def _ask_badly(self, choose: random.Random) -> None:
        body, status, words = choose.choice(_BAD)
        self.tally.asked["bad request"] += 1
        try:
            reply = await exchange(self._port, request_bytes(TEXT, body), Reading(), choose)
            if reply.status == 429:
                self.tally.endings["429 queue_full"] += 1
            elif reply.status == status and words in reply.text:
                self.tally.endings[f"{status}, as it should be"] += 1
            else:
                self._complain(f"bad request {body[:60]!r}: {reply.status} {reply.text[:200]}")
        except (OSError, TimeoutError) as error:
            self._complain(f"bad request {body[:60]!r}: {type(error).__name__} {error}")

    def _complain(self, words: str) -> None:
        self.tally.endings["wrong"] += 1
        self.tally.complaints.append(words)


def leaving(moment: Moment, choose: random.Random) -> Reading:
    """A client that leaves at that moment, anywhere in it."""
    return Reading(leaves=moment, leaves_after=choose.uniform(0.0, 0.1 if moment is Moment.ASKED else 1.0))
