"""Canaries: requests with known answers, mixed into a load. An answer that differs is a failure of the server."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from loadtest.client.outcome import Ending, Outcome
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
        texts = []
        for number in range(_NUM_QUESTIONS if share > 0.0 else 0):
            answers = [send(_question(workload, number)) for _ in range(2)]
            for answer in answers:
                if answer.ending is not Ending.OK:
                    raise MeasurementFailed(
                        f"a canary request failed on the idle server: {answer.ending}: {answer.detail}"
                    )
            if any(one.text != other.text for one, other in pairwise(answers)):
                raise MeasurementFailed("the idle server answers a greedy request in two ways; use --canary-share 0")
            texts.append(answers[0].text)
        return cls.of(workload, texts, share)

    @classmethod
    def of(cls, workload: Workload, answers: Sequence[str], share: float) -> "Canaries":
        """Return the canaries whose answers another process recorded."""
        known = [replace(_question(workload, number), expected=answer) for number, answer in enumerate(answers)]
        return cls(known, share)

    @property
    def answers(self) -> list[str]:
        """Recorded answers, in order of the questions."""
        return [str(question.expected) for question in self.known]

    def mix(self, requests: Iterator[LoadRequest], seed: int) -> Iterator[LoadRequest]:
        """Yield the requests in order, but a canary, a known question, in place of those whose number is drawn."""
        for request in requests:
            rng = random.Random(f"{seed} {request.index}")
            is_canary = rng.random() < self.share
            yield replace(rng.choice(self.known), index=request.index) if is_canary else request


def _question(workload: Workload, number: int) -> LoadRequest:
    """Return a short, greedy, streamed request, which no request of the load equals."""
    request = workload.request(-1 - number, WorkloadKind.FIXED).plain()
    return replace(request, temperature=0.0, max_tokens=min(request.max_tokens, _ANSWER_TOKENS))
