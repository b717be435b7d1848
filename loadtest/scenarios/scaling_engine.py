"""Scaling of the engine: step time over batch and context, KV-cache memory over tokens, TTFT over the cached prefix.

Imports torch.
"""

import itertools
import multiprocessing
import random
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from loadtest.inprocess.bench_engine import Sweep, make_points
from loadtest.inprocess.closed_loop import run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.inprocess.engine_points import DecodePoint
from loadtest.measurement.roofline import Roofline
from loadtest.measurement.spread import Spread
from loadtest.measurement.step_work import WEIGHT_BYTES, WorkFormula
from loadtest.scenarios.scaling_fits import fits
from model.attention.kv_cache import KVCache
from model.config import ModelConfig
from model.sampling.params import SamplingParams
from service.ipc.messages import Submit

_STEPS = 16  # steps per timed run of a batch
_BLOCK = 16
_TOKENS_A_WRITE = 4096
_DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


class Steps:
    """Decode steps over batch size at one context, and over context at one batch size."""

    def __init__(self, contestant: InProcess, batches: Sequence[int], contexts: Sequence[int]) -> None:
        facts = contestant.facts
        self._formula = WorkFormula(
            config=contestant.manifest.config,
            weight_type=facts["weights"],
            kv_value_bytes=WEIGHT_BYTES[facts["kv_cache_dtype"]],
        )
        self._contestant = contestant
        self._sweep = Sweep(contestant, Roofline(facts["weights"], facts["device"]))
        middle = batches[len(batches) // 2], contexts[len(contexts) // 2]
        self._over_batch = self._points(batches, middle[1:])
        self._over_context = self._points(middle[:1], contexts)

    def _points(self, batches: Sequence[int], contexts: Sequence[int]) -> list[DecodePoint]:
        arguments = Namespace(batch=batches, context=contexts, prompt_tokens=[], steps=_STEPS, usual=set())
        points = make_points(arguments, self._contestant.settings, self._formula, self._contestant.max_context_tokens)
        return [point for point in points if isinstance(point, DecodePoint)]

    def warm_up(self) -> None:
        """Compute the prompts once."""
        self._sweep.warm_up([*self._over_batch, *self._over_context])

    def round(self) -> Iterator[str]:
        """Add a repeat to every point. Yields the label of each point before it is measured."""
        self._sweep.probe()
        for point in (*self._over_batch, *self._over_context):
            yield point.label
            self._sweep.measure(point)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready points and fits."""
        return {
            "over_batch": _fitted(self._over_batch, "batch_size"),
            "over_context": _fitted(self._over_context, "context_length"),
        }


def _fitted(points: Sequence[DecodePoint], over: str) -> dict[str, Any]:
    figures = [point.to_dict() for point in points]
    return {"points": figures, "fits": fits([p[over] for p in figures], [p["step_ms"]["median"] for p in figures])}


def kv_memory(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the memory that becomes resident as tokens are written to a KV-cache, with the formula's value.

    Pages become resident when they are first written. A separate process is used, so that no other allocation
    changes its resident memory.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_kv_memory, config, dtype_name, tokens).result()


def _kv_memory(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> dict[str, Any]:
    dtype = _DTYPES[dtype_name]
    blocks = -(-max(tokens) // _BLOCK)
    cache = KVCache(config, num_blocks=blocks, block_size=_BLOCK, dtype=dtype, device="cpu")
    keys = torch.ones(_TOKENS_A_WRITE, config.num_kv_heads, config.key_dim, dtype=dtype)
    values = torch.ones(_TOKENS_A_WRITE, config.num_kv_heads, config.head_dim, dtype=dtype)
    other = KVCache(config, num_blocks=1, block_size=_BLOCK, dtype=dtype, device="cpu")
    other.write(
        0, torch.arange(_BLOCK), keys[:_BLOCK], values[:_BLOCK]
    )  # allocations of the first write are not counted
    before, written, points = _resident_bytes(), 0, []
    for wanted in sorted(tokens):
        while written < wanted:
            slots = torch.arange(written, min(wanted, written + _TOKENS_A_WRITE))
            for layer in range(config.num_layers):
                cache.write(layer, slots, keys[: len(slots)], values[: len(slots)])
            written += len(slots)
        formula = wanted * config.kv_bytes_per_token(dtype.itemsize)
        resident = _resident_bytes() - before
        points.append({"tokens": wanted, "bytes": resident, "formula": formula, "ratio": resident / formula})
    return {
        "bytes_per_token": config.kv_bytes_per_token(dtype.itemsize),
        "points": points,
        "fits": fits([p["tokens"] for p in points], [p["bytes"] for p in points]),
    }


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@dataclass(slots=True)
class SharedPoint:
    """A prompt with a cached prefix, compared with an uncached prompt as long as the rest.

    shared_tokens: tokens shared with an earlier prompt. hits: tokens found in the cache, as the engine reports.
    """

    shared_tokens: int
    prompt_tokens: int
    hits: int = 0
    seconds: list[float] = field(default_factory=list)
    rest_seconds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {
            "shared_tokens": self.shared_tokens,
            "rest_tokens": self.prompt_tokens - self.shared_tokens,
            "hits": self.hits,
            "ttft_ms": Spread(tuple(1e3 * seconds for seconds in self.seconds)).to_dict(),
            "rest_alone_ms": Spread(tuple(1e3 * seconds for seconds in self.rest_seconds)).to_dict(),
            "ratio": Spread.of_ratios(self.seconds, self.rest_seconds).to_dict(),
        }


class Prefixes:
    """TTFT over the length of a cached prefix."""

    def __init__(self, contestant: InProcess, prompt_tokens: int, shared: Sequence[int]) -> None:
        self._engine = contestant.engine
        self._rng = random.Random(0)
        self._vocab_size = contestant.manifest.config.vocab_size
        self._points = [SharedPoint(count, prompt_tokens) for count in shared]
        self._prompt_tokens = prompt_tokens
        self._uids = (f"shared-{number}" for number in itertools.count())

    def round(self) -> Iterator[str]:
        """Add a repeat to every point. Yields the label of each point before it is measured."""
        first = self._fresh(self._prompt_tokens)
        self._ttft(first)
        for point in self._points:
            yield f"shared {point.shared_tokens}"
            rest = self._fresh(point.prompt_tokens - point.shared_tokens)
            alone = self._fresh(len(rest))
            seconds, point.hits = self._ttft(first[: point.shared_tokens] + rest)
            point.seconds.append(seconds)
            point.rest_seconds.append(self._ttft(alone)[0])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready points, and fits over the tokens that are not shared."""
        figures = [point.to_dict() for point in self._points]
        rests = [point["rest_tokens"] for point in figures]
        return {
            "prompt_tokens": self._prompt_tokens,
            "points": figures,
            "fits": fits(rests, [point["ttft_ms"]["median"] for point in figures]),
        }

    def _fresh(self, num_tokens: int) -> tuple[int, ...]:
        """Return a random prompt, which is not in the cache."""
        return tuple(self._rng.randrange(self._vocab_size) for _ in range(num_tokens))

    def _ttft(self, token_ids: tuple[int, ...]) -> tuple[float, int]:
        """Return the TTFT in seconds, and the tokens found in the cache, of one sequence alone."""
        submit = Submit(
            uid=next(self._uids),
            attempt=0,
            prompt_token_ids=token_ids,
            prior_token_ids=(),
            params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            arrival_seconds=time.monotonic(),
            deadline_seconds=None,
        )
        engine = _Watched(self._engine)
        run = run_closed(engine, [submit], num_streams=1)
        return run.ttft_seconds[0], engine.num_cached_tokens


class _Watched:
    """Engine wrapper that notes how many tokens the last sequence found in the cache."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_cached_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_work)

    def submit(self, submit: Submit) -> None:
        self._engine.submit(submit)

    def step(self) -> Any:
        result = self._engine.step()
        for event in result.events:
            if event.finish is not None:
                self.num_cached_tokens = event.finish.num_cached_tokens
        return result
