"""Scaling of the engine: step time over batch and context, KV-cache memory over tokens, TTFT over the cached prefix.

Imports torch. Fits: y = c x^e by least squares of logarithms, y = a + b x by least squares of relative errors.
"""

import itertools
import math
import multiprocessing
import random
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from loadtest.inprocess.bench_engine import Point, Sweep, make_points
from loadtest.inprocess.closed_loop import greedy, run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.spread import ratio_spread, spread
from model.attention.kv_cache import KVCache
from model.config import ModelConfig

_STEPS = 16  # steps per timed run of a batch
_BLOCK = 16
_TOKENS_PER_WRITE = 4096


def fits(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    """Return both fits: `power` with exponent and factor, `line` with its `fixed` part and `each` per x.

    `last` is the exponent between the two largest x.

    Raises:
        ValueError: fewer than two different x, or a value that is not positive.
    """
    points = sorted(zip(xs, ys, strict=True))
    x, y = np.array(points, dtype=np.float64).T
    if (np.array(points) <= 0).any():
        raise ValueError("a fit needs positive values")
    if len(set(x)) < 2:
        raise ValueError("a fit needs at least two points with different x")
    exponent, constant = np.polyfit(np.log(x), np.log(y), 1)
    each, fixed = np.polyfit(x, y, 1, w=1 / y)
    last = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2]) if x[-1] > x[-2] else math.nan
    return {
        "power": {"exponent": float(exponent), "factor": math.exp(constant), "last": last},
        "line": {"fixed": float(fixed), "each": float(each)},
    }


class Steps:
    """Decode steps over batch size at one context, and over context at one batch size."""

    def __init__(self, contestant: InProcess, batches: Sequence[int], contexts: Sequence[int]) -> None:
        self._contestant = contestant
        self._sweep = Sweep(contestant)
        middle = batches[len(batches) // 2], contexts[len(contexts) // 2]
        self._curves = {
            "batch_size": self._points(batches, middle[1:]),
            "context_length": self._points(middle[:1], contexts),
        }
        self._all = [point for curve in self._curves.values() for point in curve]
        self._sweep.warm_up(self._all)

    def _points(self, batches: Sequence[int], contexts: Sequence[int]) -> list[Point]:
        sweep, contestant = self._sweep, self._contestant
        arguments = Namespace(batch=batches, context=contexts, prompt_tokens=[], steps=_STEPS, usual=set())
        return make_points(arguments, contestant.settings, sweep.formula, contestant.max_context_tokens)

    def round(self) -> None:
        """Add a repeat to every point."""
        self._sweep.probe()
        for point in self._all:
            self._sweep.measure(point)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready points and fits."""
        curves = {key: [point.to_dict() for point in points] for key, points in self._curves.items()}
        return {
            "over_" + key.partition("_")[0]: {
                "points": points,
                "fits": fits([point[key] for point in points], [point["step_ms"]["median"] for point in points]),
            }
            for key, points in curves.items()
        }


def kv_memory(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the memory that becomes resident as tokens are written to a KV-cache, with the formula's value.

    Pages become resident when they are first written. A separate process is used, so that no other allocation
    changes its resident memory.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_kv_memory, config, dtype_name, tokens).result()


def _kv_memory(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    blocks = -(-max(tokens) // _BLOCK)
    cache = KVCache(config, num_blocks=blocks, block_size=_BLOCK, dtype=dtype, device="cpu")
    keys = torch.ones(_TOKENS_PER_WRITE, config.num_kv_heads, config.key_dim, dtype=dtype)
    values = torch.ones(_TOKENS_PER_WRITE, config.num_kv_heads, config.head_dim, dtype=dtype)
    # Allocations of the first write are not counted.
    other = KVCache(config, num_blocks=1, block_size=_BLOCK, dtype=dtype, device="cpu")
    other.write(0, torch.arange(_BLOCK), keys[:_BLOCK], values[:_BLOCK])
    process = psutil.Process()
    before, written, points = process.memory_info().rss, 0, []
    for wanted in sorted(tokens):
        while written < wanted:
            slots = torch.arange(written, min(wanted, written + _TOKENS_PER_WRITE))
            for layer in range(config.num_layers):
                cache.write(layer, slots, keys[: len(slots)], values[: len(slots)])
            written += len(slots)
        formula = wanted * config.kv_bytes_per_token(dtype.itemsize)
        resident = process.memory_info().rss - before
        points.append({"tokens": wanted, "bytes": resident, "formula": formula, "ratio": resident / formula})
    return {
        "bytes_per_token": config.kv_bytes_per_token(dtype.itemsize),
        "points": points,
        "fits": fits([p["tokens"] for p in points], [p["bytes"] for p in points]),
    }


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
            "ttft_ms": spread(1e3 * seconds for seconds in self.seconds),
            "rest_alone_ms": spread(1e3 * seconds for seconds in self.rest_seconds),
            "ratio": ratio_spread(self.seconds, self.rest_seconds),
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

    def round(self) -> None:
        """Add a repeat to every point."""
        first = self._fresh(self._prompt_tokens)
        self._ttft(first)
        for point in self._points:
            rest = self._fresh(point.prompt_tokens - point.shared_tokens)
            seconds, point.hits = self._ttft(first[: point.shared_tokens] + rest)
            point.seconds.append(seconds)
            point.rest_seconds.append(self._ttft(self._fresh(len(rest)))[0])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready points, and fits over the tokens that are not shared."""
        points = [point.to_dict() for point in self._points]
        rests = [point["rest_tokens"] for point in points]
        return {
            "prompt_tokens": self._prompt_tokens,
            "points": points,
            "fits": fits(rests, [point["ttft_ms"]["median"] for point in points]),
        }

    def _fresh(self, num_tokens: int) -> list[int]:
        """Return a random prompt, which is not in the cache."""
        return [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]

    def _ttft(self, token_ids: list[int]) -> tuple[float, int]:
        """Return the TTFT in seconds, and the tokens found in the cache, of one sequence alone."""
        run = run_closed(self._engine, [greedy(next(self._uids), token_ids, 1)], num_streams=1)
        return run.ttft_seconds[0], run.num_cached_tokens[0]
