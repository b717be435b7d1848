"""Engine of the service in the benchmark's own process, and a closed loop over it, for comparison with HTTP."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from loadtest.client.workload import random_prompt
from model.checkpoint.manifest import Manifest, read_manifest
from model.sampling.params import SamplingParams
from service.config.settings import ModelSettings
from service.engine.engine import Engine, create_submit
from service.ipc.messages import FinishReason, Submit
from service.worker.engine_factory import EngineFacts, build_engine


@dataclass(frozen=True, slots=True)
class InProcess:
    """Engine in this process, built from settings as the worker process builds it."""

    engine: Engine
    manifest: Manifest
    built: EngineFacts
    settings: ModelSettings
    _uids: Iterator[str] = field(default_factory=lambda: map("bench-{}".format, itertools.count()))
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def open(cls, settings: ModelSettings) -> Self:
        """Build the engine. Raises ValueError if the checkpoint or the settings cannot be used."""
        manifest = read_manifest(settings.checkpoint)
        engine, built = build_engine(settings, manifest)
        return cls(engine, manifest, built, settings)

    @property
    def facts(self) -> dict[str, Any]:
        """Name, size, dtypes, limits and KV-cache size of model and engine, JSON-ready."""
        built = asdict(self.built)
        return built | {
            "name": self.manifest.name,
            "parameters": self.manifest.config.num_parameters,
            "weights": built["matrices"] if built["matrices"] in ("int8", "int6", "int4", "fp8") else built["dtype"],
            "max_num_running": self.settings.max_num_running,
            "max_batched_tokens": self.settings.max_batched_tokens,
            "kv_cache_tokens": self.built.num_blocks * self.built.block_size,
        }

    def random_prompt(self, num_tokens: int) -> list[int]:
        """Return new random token ids, which the prefix cache does not hold."""
        return random_prompt(self._rng, self.manifest.config.vocab_size, num_tokens)

    def complete(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, num_streams: int | None = None
    ) -> "EngineRun":
        """Continue prompts greedily by exactly `num_tokens` tokens, and return the times of the tokens.

        num_streams: number of prompts in the engine at a time; None: all prompts.
        """
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        submits = [create_submit(next(self._uids), prompt, params) for prompt in prompts]
        return run_closed(self.engine, submits, num_streams=num_streams or len(submits))


@dataclass(kw_only=True, slots=True)
class EngineRun:
    """Times and token counts of a closed loop. Lists have one item per sequence. Times: `time.perf_counter()` seconds.

    token_seconds: end of each token's engine step. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    began_seconds: float
    ended_seconds: float
    submitted_seconds: list[float] = field(default_factory=list)
    token_seconds: list[list[float]] = field(default_factory=list)
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
                f"fewer than two steps computed a token of each of the {len(self.token_seconds)} sequences; "
                "raise --max-batched-tokens or --steps"
            )
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    @property
    def ttft_seconds(self) -> tuple[float, ...]:
        """Seconds from submission to first token, for each sequence."""
        pairs = zip(self.submitted_seconds, self.token_seconds, strict=True)
        return tuple(times[0] - submitted for submitted, times in pairs)


def run_closed(engine: Any, submits: Iterable[Submit], *, num_streams: int) -> EngineRun:
    """Run all these sequences in an engine, `num_streams` at a time, and return their times and token counts.

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
            if finish is not None:
                if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise RuntimeError(f"sequence {event.uid} ended with {finish.reason}: {finish.error}")
                run.num_cached_tokens[number] = finish.num_cached_tokens
                num_open += submit_next(1) - 1
    run.ended_seconds = time.perf_counter()
    return run
