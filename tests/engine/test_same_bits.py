"""Batch invariance with native kernels: text, ids and logprobs do not depend on the other requests of a batch.

All comparisons are exact.
"""

import random
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from model.attention.native import NativeAttention
from model.nn.linear import replace_linears
from model.nn.transformer import Transformer
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import Pooling, Submit
from tests.engine.fakes import make_submit
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of

TOKENIZER = train_bpe([(Path(__file__).parents[1] / "data" / "aesop.txt").read_text()], 300)
(EOS,) = TOKENIZER.eos_token_ids
NUM_REQUESTS = 90


class Answers:
    """Engine, with the tokens, texts, logprobs and embeddings of each uid, and totals of the statistics."""

    def __init__(self, model: Transformer, **config: int | str) -> None:
        values = {"block_size": 4, "num_blocks": 2000, "max_num_running": 64, "max_batched_tokens": 512, **config}
        self._engine = Engine(model, TOKENIZER, EngineConfig(**values))  # type: ignore[arg-type]
        self.reported: dict[str, list[object]] = {}
        self.num_preemptions = self.largest_batch = self.num_cached = 0

    def ask(self, *submits: Submit) -> None:
        for submit in submits:
            self._engine.submit(submit)
        while self._engine.has_work:
            result = self._engine.step()
            self.num_preemptions += result.stats.num_preemptions
            self.largest_batch = max(self.largest_batch, result.stats.batch_size)
            for delta in result.events:
                answer = self.reported.setdefault(delta.uid, [])
                answer += [*delta.token_ids, delta.text, *(delta.logprobs or ()), delta.embedding]
                if delta.finish is not None:
                    self.num_cached += delta.finish.num_cached_tokens


def model_of(level: str, numbers: str, variant: str = "rotary-gqa") -> Transformer:
    model, backend = build(VARIANTS[variant]), NativeAttention(library_of(level))
    for block in model.layers:
        block.attention.backend = backend  # type: ignore[union-attr]
    if numbers in ("int8", "int4"):
        replace_linears(model, numbers)
        return model
    return model.to(getattr(torch, numbers))


def requests() -> list[Submit]:
    """Make greedy and seeded submissions of mixed lengths, many with a shared prefix."""
    rng = random.Random(7)
    beginnings = [[rng.randrange(EOS) for _ in range(20)] for _ in range(4)]
    made = []
    for number in range(NUM_REQUESTS):
        prompt = rng.choice([*beginnings, []]) + [rng.randrange(EOS) for _ in range(rng.randint(1, 20))]
        made.append(
            make_submit(
                f"r{number}",
                prompt,
                max_tokens=rng.randint(4, 24),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.randrange(2**64),
                ignore_eos=True,
                logprobs=rng.choice([None, 0, 3]),
            )
        )
    return made


CASES = [
    ("rotary-gqa", "float32", "int8"),
    ("rotary-gqa", "bfloat16", "auto"),
    ("rotary-gqa", "int8", "int8"),
    ("rotary-gqa", "int4", "auto"),
    ("gemma4", "bfloat16", "auto"),
]


@pytest.mark.parametrize(("variant", "numbers", "cache_dtype"), CASES)
@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_completions_are_identical_alone_and_in_any_batch(
    level: str, variant: str, numbers: str, cache_dtype: str
) -> None:
    """Compare requests one at a time with the same requests 64 at once: chunked, with prefix hits, preempted."""
    asked = requests()
    make = partial(model_of, level, numbers, variant)
    alone = Answers(make(), enable_prefix_cache=False, kv_cache_dtype=cache_dtype)
    for submit in asked:
        alone.ask(submit)
    assert len(alone.reported) == NUM_REQUESTS
    assert (alone.largest_batch, alone.num_cached) == (1, 0)
    crowded = Answers(make(), max_batched_tokens=128, kv_cache_dtype=cache_dtype)
    crowded.ask(*asked)
    assert crowded.reported == alone.reported
    assert crowded.largest_batch == 64
    assert crowded.num_cached > 200
    starved = Answers(make(), num_blocks=24, enable_prefix_cache=False, kv_cache_dtype=cache_dtype)
    starved.ask(*asked)
    assert starved.reported == alone.reported
    assert starved.num_preemptions > 3


@pytest.mark.parametrize("numbers", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_completions_of_a_mixture_of_experts_are_identical_alone_and_in_a_batch(level: str, numbers: str) -> None:
    """An expert computes one row of a request alone, and rows of many requests in a batch."""
    asked = requests()[:40]
    alone = Answers(model_of(level, numbers, "experts"), enable_prefix_cache=False)
    for submit in asked:
        alone.ask(submit)
    crowded = Answers(model_of(level, numbers, "experts"))
    crowded.ask(*asked)
    assert crowded.reported == alone.reported
    assert crowded.largest_batch == len(asked)


@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_embeddings_computed_whole_and_in_chunks_are_identical(level: str) -> None:
    rng = random.Random(8)
    asked = [
        msgspec.structs.replace(
            make_submit(f"t{number}", [rng.randrange(EOS) for _ in range(rng.randint(1, 60))], max_tokens=0),
            pooling=rng.choice(list(Pooling)),
        )
        for number in range(40)
    ]
    alone = Answers(model_of(level, "float32"), enable_prefix_cache=False)
    for submit in asked:
        alone.ask(submit)
    assert all(isinstance(answer[-1], bytes) for answer in alone.reported.values())
    chunked = Answers(model_of(level, "float32"), max_num_running=8, max_batched_tokens=17)
    chunked.ask(*asked)
    assert chunked.largest_batch > 1
    assert chunked.reported == alone.reported
