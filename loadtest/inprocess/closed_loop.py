"""Closed loop over an engine in this process: N sequences run at a time, for comparison with HTTP."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.sampling.params import SamplingParams
from service.ipc.messages import FinishReason, Submit


def submit_of(uid: str, token_ids: Sequence[int], params: SamplingParams) -> Submit:
    """Return the `Submit` command that the API process would send to the engine for this prompt."""
    return Submit(
        uid=uid,
        attempt=0,
        prompt_token_ids=tuple(token_ids),
        prior_token_ids=(),
        params=params,
        arrival_seconds=time.monotonic(),
        deadline_seconds=None,
    )


def greedy(uid: str, token_ids: Sequence[int], max_tokens: int) -> Submit:
    """Return the engine's command for a greedy completion of exactly `max_tokens` tokens."""
    return submit_of(uid, token_ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@dataclass(kw_only=True, slots=True)
class EngineRun:
    """Times and tokens of a closed loop. Lists have one item per sequence; times are `time.perf_counter()` seconds.

    token_seconds: end of each token's engine step. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    began_seconds: float
    ended_seconds: float
    submitted_seconds: list[float] = field(default_factory=list)
    token_seconds: list[list[float]] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)

    @property
    def num_completion_tokens(self) -> int:
        """Number of completion tokens of all sequences together."""
        return sum(map(len, self.token_seconds))

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of all sequences per second of the whole loop, which includes prefill."""
        return self.num_completion_tokens / (self.ended_seconds - self.began_seconds)

    @property
    def full_step_seconds(self) -> float:
        """Mean seconds of a step in which every sequence got a token. Raises ValueError without two such steps."""
        tokens_at = Counter(seconds for times in self.token_seconds for seconds in times)
        ends = [seconds for seconds, count in sorted(tokens_at.items()) if count == len(self.token_seconds)]
        if len(ends) < 2:
            raise ValueError(
                f"{len(self.token_seconds)} sequences never ran all at once; raise --max-batched-tokens or --steps"
            )
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def ttft_seconds(self) -> tuple[float, ...]:
        """Seconds from submission to first token, for each sequence."""
        pairs = zip(self.submitted_seconds, self.token_seconds, strict=True)
        return tuple(times[0] - submitted for submitted, times in pairs)


def run_closed(engine: Any, submits: Iterable[Submit], *, num_streams: int) -> EngineRun:
    """Run all these sequences in an engine, `num_streams` at a time, and return their times and tokens.

    Raises:
        RuntimeError: a sequence ended with an error, or the engine is idle while sequences are unfinished.
    """
    waiting = iter(submits)
    numbers: dict[str, int] = {}
    began = time.perf_counter()
    run = EngineRun(began_seconds=began, ended_seconds=began)

    def submit_next(count: int) -> int:
        """Submit the next sequences to the engine, at most `count`, and return their number."""
        submits = list(itertools.islice(waiting, count))
        for submit in submits:
            numbers[submit.uid] = len(numbers)
            run.submitted_seconds.append(time.perf_counter())
            run.token_seconds.append([])
            run.token_ids.append([])
            run.num_cached_tokens.append(0)
            engine.submit(submit)
        return len(submits)

    num_open = submit_next(num_streams)
    while num_open:
        if not engine.has_work:
            raise RuntimeError(f"the engine is idle with {num_open} sequences unfinished")
        events = engine.step().events
        now = time.perf_counter()
        for event in events:
            number, finish = numbers[event.uid], event.finish
            run.token_seconds[number] += [now] * len(event.token_ids)
            run.token_ids[number] += event.token_ids
            if finish is not None:
                if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise RuntimeError(f"sequence {event.uid} ended with {finish.reason}: {finish.error}")
                run.num_cached_tokens[number] = finish.num_cached_tokens
                num_open += submit_next(1) - 1
    run.ended_seconds = time.perf_counter()
    return run
