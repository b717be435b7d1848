"""Clients that disconnect at every stage of a request, and the server's counts of the tokens computed for them."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.e2e.process import Service
from tests.faults.census import idle
from tests.faults.questions import Question
from tests.faults.traffic import leaving
from tests.faults.wire import Moment, exchange, request_bytes

# Time for which the server buffers a response with an Idempotency-Key; then it counts the tokens as wasted.
RESUME_SECONDS = 4.0
_AT_ONCE = 12


class Kind(StrEnum):
    """Kind of request. With an Idempotency-Key the server continues the response after the disconnect."""

    STREAM = "streams"
    BODY = "bodies"
    KEYED = "streams with an Idempotency-Key"


@dataclass(slots=True)
class Departures:
    """Disconnects by stage of the request, and the server's counts of tokens that were computed meanwhile.

    num_sent: tokens that the server sent before the disconnect.
    """

    kind: Kind
    moments: Counter[str] = field(default_factory=Counter)
    num_generated: int = 0
    num_sent: int = 0
    num_wasted: int = 0

    @property
    def num_clients(self) -> int:
        return self.moments.total()


async def depart(
    service: Service, kind: Kind, asked: Sequence[Question], number: int, choose: random.Random
) -> Departures:
    """Send `number` requests that disconnect, with the stages in turn, and wait until the server is idle.

    Raises:
        TimeoutError: the server does not become idle.
    """
    departures, port, places = Departures(kind), int(service.url.rpartition(":")[2]), asyncio.Semaphore(_AT_ONCE)

    async def one(place: int) -> None:
        moment, question = list(Moment)[place % len(Moment)], choose.choice(asked)
        body = question.body if kind is Kind.BODY else {**question.body, "stream": True}
        headers = {"idempotency-key": f"{choose.getrandbits(64):x}"} if kind is Kind.KEYED else {}
        async with places:
            await exchange(port, request_bytes(question.path, body, headers), leaving(moment, choose), choose)
        departures.moments[moment] += 1

    before = await idle(service)
    await asyncio.gather(*map(one, range(number)))
    await idle(service)
    if kind is Kind.KEYED:
        await asyncio.sleep(RESUME_SECONDS + 2.0)  # the server drops unclaimed responses meanwhile
    after = await idle(service)
    change = {name: int(after[name] - before.get(name, 0)) for name in after}
    departures.num_generated = change["generation_tokens_total"]
    # Tokens of unclaimed responses were buffered, so the metrics count them as sent.
    num_unclaimed = change["wasted_tokens_total{unclaimed}"] if kind is Kind.KEYED else 0
    departures.num_wasted = change["wasted_tokens_total{cancelled}"] + num_unclaimed
    if kind is Kind.BODY:  # either all tokens of a body are sent, or none
        departures.num_sent = change["request_generation_tokens_sum"]
    else:  # each sent token has either a TTFT or an inter-token latency
        num_told = change["time_to_first_token_seconds_count"] + change["inter_token_latency_seconds_count"]
        departures.num_sent = num_told - num_unclaimed
    return departures


def askable(asked: Sequence[Question], kind: Kind) -> list[Question]:
    """Return the requests whose sent tokens can be counted: streamable requests, for bodies with one choice only."""
    streamed = [question for question in asked if question.may_stream]
    return [question for question in streamed if "n" not in question.body] if kind is Kind.BODY else streamed
