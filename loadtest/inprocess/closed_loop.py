"""The engine in-process under N closed-loop clients: the counterpart of HTTP figures."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from service.ipc.messages import FinishReason, Submit, TokenDelta


class StepResult(Protocol):
    """Result of a step, as far as a benchmark reads it."""

    @property
    def events(self) -> Any: ...


class Engine(Protocol):
    """Interface of `service.engine.engine.Engine` that a benchmark uses."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, submit: Submit) -> Any: ...
    def step(self) -> StepResult: ...


@dataclass(slots=True)
class _Stream:
    submitted_seconds: float
    token_seconds: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRun:
    """Figures of an engine run, in `time.perf_counter()` seconds.

    token_seconds: for each sequence, the end of the step of each of its tokens.
    submitted_seconds: for each sequence, the time of its submission.
    token_ids: for each sequence, its tokens.
    """

    began_seconds: float
    ended_seconds: float
    num_prompt_tokens: int
    submitted_seconds: tuple[float, ...]
    token_seconds: tuple[tuple[float, ...], ...]
    token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens of all sequences."""
        return sum(map(len, self.token_seconds))

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over the whole run, prefill included, as a client would see them."""
        return self.num_completion_tokens / (self.ended_seconds - self.began_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens until the last sequence had its first token. For one wave of sequences, not for a loop."""
        return self.num_prompt_tokens / (self._prefill_end - self.began_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Completion tokens after the last sequence had its first one. For one wave of sequences, not for a loop."""
        later = sum(seconds > self._prefill_end for times in self.token_seconds for seconds in times)
        return later / (self.ended_seconds - self._prefill_end)

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
    def _prefill_end(self) -> float:
        return max(times[0] for times in self.token_seconds)

    @property
    def ttft_seconds(self) -> tuple[float, ...]:
        """Submission to first token of each sequence."""
        return tuple(
            times[0] - submitted for submitted, times in zip(self.submitted_seconds, self.token_seconds, strict=True)
        )


def run_closed(engine: Engine, submits: Iterable[Submit], *, num_streams: int) -> EngineRun:
    """Keep `num_streams` sequences in the engine until all are done.

    Raises:
        RuntimeError: a sequence ended in error, or the engine stopped before its sequences did.
    """
    waiting = iter(submits)
    streams: dict[str, _Stream] = {}
    num_prompt_tokens = num_open = 0
    began = time.perf_counter()

    def submit_next() -> int:
        nonlocal num_prompt_tokens
        submit = next(waiting, None)
        if submit is None:
            return 0
        streams[submit.uid] = _Stream(time.perf_counter())
        num_prompt_tokens += len(submit.prompt_token_ids)
        engine.submit(submit)
        return 1

    for _ in range(num_streams):
        num_open += submit_next()
    while num_open:
        if not engine.has_work:
            raise RuntimeError(f"the engine is idle with {num_open} sequences unfinished")
        events = engine.step().events
        now = time.perf_counter()
        for event in events:
            assert isinstance(event, TokenDelta), "an engine's events are token deltas"
            streams[event.uid].token_seconds += [now] * len(event.token_ids)
            streams[event.uid].token_ids += event.token_ids
            if event.finish is not None:
                if event.finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise RuntimeError(f"sequence {event.uid} ended with {event.finish.reason}: {event.finish.error}")
                num_open += submit_next() - 1
    return EngineRun(
        began_seconds=began,
        ended_seconds=time.perf_counter(),
        num_prompt_tokens=num_prompt_tokens,
        submitted_seconds=tuple(stream.submitted_seconds for stream in streams.values()),
        token_seconds=tuple(tuple(stream.token_seconds) for stream in streams.values()),
        token_ids=tuple(tuple(stream.token_ids) for stream in streams.values()),
    )
