"""The engine in-process under N closed-loop clients: the counterpart of HTTP figures."""

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.sampling.params import SamplingParams
from service.ipc.messages import FinishReason, Submit


def submit_of(uid: str, token_ids: Sequence[int], params: SamplingParams) -> Submit:
    """Return the command that the API process would send for a prompt."""
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
    """Return the command for a greedy completion of exactly `max_tokens` tokens."""
    return submit_of(uid, token_ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@dataclass(slots=True)
class _Stream:
    submitted_seconds: float
    token_seconds: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRun:
    """Figures of an engine run, in `time.perf_counter()` seconds, sequence by sequence.

    token_seconds: end of the step of each token. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    began_seconds: float
    ended_seconds: float
    submitted_seconds: tuple[float, ...]
    token_seconds: tuple[tuple[float, ...], ...]
    token_ids: tuple[tuple[int, ...], ...] = ()
    num_cached_tokens: tuple[int, ...] = ()

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens of all sequences."""
        return sum(map(len, self.token_seconds))

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over the whole run, prefill included, as a client would see them."""
        return self.num_completion_tokens / (self.ended_seconds - self.began_seconds)

    @property
    def full_step_seconds(self) -> float:
        """Mean time of a step in which every sequence got a token, from the end of one such step to the next.

        Raises:
            ValueError: there are fewer than two such steps.
        """
        tokens_at = Counter(seconds for times in self.token_seconds for seconds in times)
        ends = [seconds for seconds, count in sorted(tokens_at.items()) if count == len(self.token_seconds)]
        if len(ends) < 2:
            raise ValueError(
                f"{len(self.token_seconds)} sequences never ran all at once; allow more tokens per step, or more steps"
            )
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def ttft_seconds(self) -> tuple[float, ...]:
        """Submission to first token of each sequence."""
        pairs = zip(self.submitted_seconds, self.token_seconds, strict=True)
        return tuple(times[0] - submitted for submitted, times in pairs)


def run_closed(engine: Any, submits: Iterable[Submit], *, num_streams: int) -> EngineRun:
    """Keep `num_streams` sequences in the engine until all are done.

    Args:
        engine: a `service.engine.engine.Engine`, or an object with its `has_work`, `submit` and `step`.

    Raises:
        RuntimeError: a sequence ended in error, or the engine stopped before its sequences did.
    """
    waiting = iter(submits)
    streams: dict[str, _Stream] = {}
    began = time.perf_counter()

    def submit_next(count: int) -> int:
        """Submit up to `count` waiting sequences and return their number."""
        submits = list(itertools.islice(waiting, count))
        for submit in submits:
            streams[submit.uid] = _Stream(time.perf_counter())
            engine.submit(submit)
        return len(submits)

    num_open = submit_next(num_streams)
    while num_open:
        if not engine.has_work:
            raise RuntimeError(f"the engine is idle with {num_open} sequences unfinished")
        events = engine.step().events
        now = time.perf_counter()
        for event in events:
            stream, finish = streams[event.uid], event.finish
            stream.token_seconds += [now] * len(event.token_ids)
            stream.token_ids += event.token_ids
            if finish is not None:
                if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise RuntimeError(f"sequence {event.uid} ended with {finish.reason}: {finish.error}")
                stream.num_cached_tokens = finish.num_cached_tokens
                num_open += submit_next(1) - 1
    return EngineRun(
        began_seconds=began,
        ended_seconds=time.perf_counter(),
        submitted_seconds=tuple(stream.submitted_seconds for stream in streams.values()),
        token_seconds=tuple(tuple(stream.token_seconds) for stream in streams.values()),
        token_ids=tuple(tuple(stream.token_ids) for stream in streams.values()),
        num_cached_tokens=tuple(stream.num_cached_tokens for stream in streams.values()),
    )
