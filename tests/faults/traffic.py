"""Clients that send one request after the other until the faults end, and the outcomes of their requests."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.client.http1 import Pace
from loadtest.client.outcome import ClientKind, Ending, Outcome
from tests.faults.oracle import CASUALTIES, Answer, Oracle, WrongAnswer
from tests.faults.questions import TEXT, Question
from tests.faults.wire import Moment, Reading, Reply, exchange, request_bytes
from tests.service.bad_requests import BAD_REQUESTS, CONTEXT, VOCABULARY

_SLOW, _DRIPPING = Reading(pace=Pace(512, 0.02)), Reading(num_drops=6)
# Behaviour of a client, and its frequency in percent.
_MANNERS = {
    "read without delay": 50,
    "read slowly": 8,
    "sent in pieces": 8,
    "disconnected": 14,
    "resumed by event id": 7,
    "repeated by key": 5,
    "bad request": 8,
}
# Bad requests with these words in their error depend on the vocabulary or context of the tiny model.
_ONE_MODELS = ("context", "vocabulary", str(CONTEXT), str(VOCABULARY))
_BAD = [bad for bad in BAD_REQUESTS if not any(word in bad[2] for word in _ONE_MODELS) and len(bad[0]) < 10**6]


@dataclass(slots=True)
class Tally:
    """Counts of requests, client behaviours and outcomes, and the errors found."""

    asked: Counter[str] = field(default_factory=Counter)  # by kind of question
    manners: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    num_tokens: int = 0
    outcomes: list[Outcome] = field(default_factory=list)  # of clients that read without delay
    casualties: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each failed request
    complaints: list[str] = field(default_factory=list)

    def time(self, answer: Answer | dict[str, Any], reply: Reply) -> None:
        """Add the times of a response to the outcomes, as the load test records them."""
        is_right, usage = isinstance(answer, Answer), answer.usage if isinstance(answer, Answer) else {}
        outcome = Outcome(
            index=len(self.outcomes),
            client=ClientKind.STREAMING if reply.is_stream else ClientKind.WHOLE,
            intended_seconds=reply.began,
            sent_seconds=reply.began,
            ending=Ending.OK if is_right else Ending.SHED if reply.status == 429 else Ending.HTTP_ERROR,
            detail="" if isinstance(answer, Answer) else answer["code"],
            chunk_seconds=reply.piece_seconds if reply.is_stream else [],
            end_seconds=reply.ended,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
        )
        self.outcomes.append(outcome)

    def saw(self, outcome: Answer | dict[str, Any], reply: Reply) -> None:
        """Count a correct response or a permitted error."""
        if isinstance(outcome, Answer):
            self.endings["correct response"] += 1
            self.num_compared += 1
            self.num_tokens += outcome.num_tokens
            return
        self.endings[f"{reply.status if reply.status != 200 else 'in the stream'} {outcome['code']}"] += 1
        if outcome["code"] in CASUALTIES:
            self.casualties.append((reply.began, reply.ended))


class Traffic:
    """Clients of one server.

    Args:
        port: port of the server.
        asked: requests that the clients send.
        oracle: stores and compares the responses.
    """

    def __init__(self, port: int, asked: Sequence[Question], oracle: Oracle) -> None:
        self._port = port
        self._asked = asked
        self._oracle = oracle
        self.tally = Tally()

    async def learn(self, *, at_once: int) -> None:
        """Send each request without streaming, `at_once` concurrently, and store the responses as the reference."""

        async def learn_one(number: int) -> None:
            question = self._asked[number]
            async with places:
                sent = request_bytes(question.path, question.body)
                self._oracle.learn(number, question, await exchange(self._port, sent, Reading(), random.Random()))

        places = asyncio.Semaphore(at_once)
        await asyncio.gather(*map(learn_one, range(len(self._asked))))

    async def check_all(self, choose: random.Random, *, at_once: int) -> None:
        """Send each request once more, and check that it succeeds with the reference response."""

        async def check(number: int) -> None:
            async with places:
                before = self.tally.num_compared
                await self._ask(number, "read without delay", choose)
                if self.tally.num_compared == before:
                    self.tally.complaints.append(f"request {number} failed without a fault")

        places = asyncio.Semaphore(at_once)
        if at_once == 1:
            for number in range(len(self._asked)):
                await check(number)
        else:
            await asyncio.gather(*map(check, range(len(self._asked))))

    async def flood(self, number: int, choose: random.Random) -> None:
        """Send `number` requests at once."""
        manner = "in a flood"
        await asyncio.gather(*(self._ask(choose.randrange(len(self._asked)), manner, choose) for _ in range(number)))

    async def client(self, choose: random.Random, over: asyncio.Event) -> None:
        """Send requests as one client until `over` is set."""
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
            manner = "read without delay"
        self.tally.asked[question.kind] += 1
        self.tally.manners[manner] += 1
        body = (
            {**question.body, "stream": True, "stream_options": {"include_usage": True}} if streams else question.body
        )
        try:
            match manner:
                case "disconnected":
                    await self._leave(question.path, body, choose)
                    return
                case "resumed by event id":
                    reply = await self._resume(question.path, body, choose)
                case "repeated by key":
                    reply = await self._repeat(question.path, body, choose)
                case _:
                    reading = {"read slowly": _SLOW, "sent in pieces": _DRIPPING}.get(manner, Reading())
                    reply = await exchange(self._port, request_bytes(question.path, body), reading, choose)
            outcome = self._oracle.judge(number, question, reply)
            self.tally.saw(outcome, reply)
            if manner == "read without delay":
                self.tally.time(outcome, reply)
            if not isinstance(outcome, Answer) and "retry-after-ms" in reply.headers and manner != "in a flood":
                await asyncio.sleep(min(1.0, int(reply.headers["retry-after-ms"]) / 1000))
        except (WrongAnswer, AssertionError, OSError, TimeoutError) as error:
            self._complain(
                f"{question.kind}, {manner}, {'stream' if streams else 'body'}: {type(error).__name__} {error}"
            )

    async def _leave(self, path: str, body: dict[str, Any], choose: random.Random) -> None:
        moment = choose.choice(list(Moment))
        await exchange(self._port, request_bytes(path, body), leaving(moment, choose), choose)
        self.tally.endings["client disconnected"] += 1

    async def _resume(self, path: str, body: dict[str, Any], choose: random.Random) -> Reply:
        """Disconnect from a stream, and resume it by its last event id. Return the whole stream as one reply."""
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
        # Without an event id, the whole request is repeated, and this time the client stays.
        return reply if reply.is_complete else await exchange(self._port, request_bytes(path, body), Reading(), choose)

    async def _repeat(self, path: str, body: dict[str, Any], choose: random.Random) -> Reply:
        """Disconnect, and send the request again with the same Idempotency-Key."""
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
                self.tally.endings[f"{status}, as expected"] += 1
            else:
                self._complain(f"bad request {body[:60]!r}: {reply.status} {reply.text[:200]}")
        except (OSError, TimeoutError) as error:
            self._complain(f"bad request {body[:60]!r}: {type(error).__name__} {error}")

    def _complain(self, words: str) -> None:
        self.tally.endings["wrong"] += 1
        self.tally.complaints.append(words)


def leaving(moment: Moment, choose: random.Random) -> Reading:
    """Return a client behaviour that disconnects at a random point of this stage."""
    return Reading(leaves=moment, leaves_after=choose.uniform(0.0, 0.1 if moment is Moment.ASKED else 1.0))
