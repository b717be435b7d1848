"""Clients that leave at every moment; what was computed for them is counted, and nothing of them is left."""

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

# What the server keeps for a client that gave a key, and then counts as waste; it looks every second.
RESUME_SECONDS = 4.0
_AT_ONCE = 12


class Kind(StrEnum):
    """What the clients asked for. Who gave a key may come back, and so is waited for."""

    STREAM = "streams"
    BODY = "bodies"
    KEYED = "streams with an Idempotency-Key"


@dataclass(slots=True)
class Departures:
    """Clients that left, and the tokens that were computed meanwhile, by the server's own count.

    num_sent: tokens that left the server in time.
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
    """Have so many clients ask and leave, each moment in turn, and wait until the server is idle.

    Raises:
        TimeoutError: it does not become idle.
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
        await asyncio.sleep(RESUME_SECONDS + 2.0)  # what is kept for nobody has to outlive its time
    after = await idle(service)
    change = {name: int(after[name] - before.get(name, 0)) for name in after}
    departures.num_generated = change["generation_tokens_total"]
    # These were kept, and so seemed sent.
    num_unclaimed = change["wasted_tokens_total{unclaimed}"] if kind is Kind.KEYED else 0
    departures.num_wasted = change["wasted_tokens_total{cancelled}"] + num_unclaimed
    if kind is Kind.BODY:  # all of its tokens, or none
        departures.num_sent = change["request_generation_tokens_sum"]
    else:  # each token is a first one or has a time since the one before it
        num_told = change["time_to_first_token_seconds_count"] + change["inter_token_latency_seconds_count"]
        departures.num_sent = num_told - num_unclaimed
    return departures


def askable(asked: Sequence[Question], kind: Kind) -> list[Question]:
    """Those whose tokens the server's counts tell apart: a body of one choice, and whatever may be streamed."""
    streamed = [question for question in asked if question.may_stream]
    return [question for question in streamed if "n" not in question.body] if kind is Kind.BODY else streamed
