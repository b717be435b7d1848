"""Canaries: requests with known answers, mixed into a load. An answer that differs is a failure of the server."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from loadtest.client.outcome import ClientKind, Ending, Outcome
from loadtest.client.requests import LoadRequest
from loadtest.client.workload import Workload, WorkloadKind
from loadtest.measurement.benchmark_program import MeasurementFailed

_NUM_QUESTIONS, _ANSWER_TOKENS = 4, 16


@dataclass(frozen=True, slots=True)
class Canaries:
    """Greedy requests whose answers were recorded on the idle server, and their share of the load."""

    known: Sequence[LoadRequest]
    share: float

    @classmethod
    def ask(cls, send: Callable[[LoadRequest], Outcome], workload: Workload, share: float) -> "Canaries":
        """Ask the questions one after the other, each twice, and return the canaries. A share of 0 asks none.

        Raises MeasurementFailed if the server fails, or answers a question in two ways.
        """
        known = []
        for number in range(_NUM_QUESTIONS if share > 0.0 else 0):
            question = replace(
                workload.request(-1 - number, WorkloadKind.FIXED), temperature=0.0, client=ClientKind.STREAMING
            )
            question = replace(question, cancel_after=None, max_tokens=min(question.max_tokens, _ANSWER_TOKENS))
            answers = [send(question) for _ in range(2)]
            for answer in answers:
                if answer.ending is not Ending.OK:
                    raise MeasurementFailed(f"a canary fails on the idle server: {answer.ending}: {answer.detail}")
            if any(one.text != other.text for one, other in pairwise(answers)):
                raise MeasurementFailed("the idle server answers a greedy request in two ways; use --canary-share 0")
            known.append(replace(question, expected=answers[0].text))
        return cls(known, share)

    def mix(self, requests: Iterator[LoadRequest], seed: int) -> Iterator[LoadRequest]:
        """Yield the requests in order, and a canary instead of a random share of them."""
        rng = random.Random(seed)
        for request in requests:
            is_canary = rng.random() < self.share
            yield replace(rng.choice(self.known), index=request.index) if is_canary else request
