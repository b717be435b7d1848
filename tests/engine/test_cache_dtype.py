"""Completions with a float16 or int8 KV-cache: batch-invariant, and close to those with the model's dtype."""

import dataclasses
from typing import Literal

import pytest
import torch

from model.inspect.attention_weights import weights_of_layer
from service.engine.engine import Engine
from tests.engine.test_native_engine import CONFIG, CROWDED, TOKENIZER, answer, drive, native, native_model, submissions
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE

DTYPES: list[Literal["float16", "int8"]] = ["float16", "int8"]
HALF = dataclasses.replace(CONFIG, kv_cache_dtype="float16")


@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize(
    ("variant", "kind"), [("rotary-gqa", "plain"), ("rotary-gqa", "int8"), ("rotary-gqa", "int4"), ("gpt2", "plain")]
)
def test_a_completion_is_batch_invariant(
    level: str, variant: str, kind: str, cache_dtype: Literal["float16", "int8"]
) -> None:
    """Cover chunks, prefix-cache hits, preemption, and draft tokens."""
    submits = submissions(12)
    guessing = dataclasses.replace(CROWDED, kv_cache_dtype=cache_dtype, max_draft_tokens=3)
    model = native_model(variant, native(level), kind=kind)
    crowd, stats = drive(Engine(model, TOKENIZER, guessing), submits)
    for name in ("num_preemptions", "num_prefix_hits"):
        assert sum(getattr(step, name) for step in stats) > 0
    rounding = dataclasses.replace(CONFIG, kv_cache_dtype=cache_dtype)
    alone = Engine(native_model(variant, native(level), kind=kind), TOKENIZER, rounding)
    for submit in submits:
        reported, _ = drive(alone, [submit])
        assert answer(reported[submit.uid]) == answer(crowd[submit.uid])


@pytest.mark.parametrize(("cache_dtype", "most"), [("float16", 5e-3), ("int8", 5e-2)])
@pytest.mark.parametrize("variant", ["rotary-gqa", "average", "relative-bias-window", "disentangled"])
def test_pytorch_attention_serves_with_a_rounding_cache(
    variant: str, cache_dtype: Literal["float16", "int8"], most: float
) -> None:
    """Logprobs with a rounding and with a float32 KV-cache differ only by rounding."""
    submits = submissions(6)
    rounding, crowded = (dataclasses.replace(config, kv_cache_dtype=cache_dtype) for config in (CONFIG, CROWDED))
    crowd, _ = drive(Engine(build(VARIANTS[variant]), TOKENIZER, crowded), submits)
    firsts = {}
    for config in (rounding, CONFIG):
        engine = Engine(build(VARIANTS[variant]), TOKENIZER, config)
        for submit in submits:
            reported, _ = drive(engine, [submit])
            logprob = answer(reported[submit.uid])[1][0].logprob
            assert logprob is not None
            firsts[submit.uid, config.kv_cache_dtype] = logprob
            if config is rounding:
                assert answer(reported[submit.uid])[0] == answer(crowd[submit.uid])[0]
    differences = [abs(firsts[s.uid, cache_dtype] - firsts[s.uid, "auto"]) for s in submits]
    assert 0 < max(differences) < most


def test_attention_weights_use_the_cache_dtype() -> None:
    model = build(VARIANTS["rotary-gqa"])
    looks = {}
    for config in (CONFIG, HALF):
        engine = Engine(model, TOKENIZER, config)
        looks[config.kv_cache_dtype] = torch.frombuffer(
            bytearray(engine.attention_weights((9, 8, 7), layer=1, heads=(2,))), dtype=torch.float32
        )
    wanted = weights_of_layer(model, (9, 8, 7), layer=1, cache_dtype=torch.float16)[2]
    rows, columns = torch.tril_indices(3, 3)
    assert torch.equal(looks["float16"], wanted[rows, columns])
    assert not torch.equal(looks["float16"], looks["auto"])
