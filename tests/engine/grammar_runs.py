"""Runs of grammar-constrained submissions on a tiny model."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.nn.transformer import Transformer
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import Finish, FinishReason, StepStats, Submit, TokenDelta
from tests.engine.fakes import make_submit
from tests.tiny_model import tiny_config, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@cache
def model() -> Transformer:
    """Return a tiny model with large random weights, so that its token distributions are far from uniform."""
    tiny = Transformer(tiny_config(TOKENIZER.vocab_size, max_context_length=1024), ATTENTION_BACKENDS["sdpa"])
    generator = torch.Generator().manual_seed(0)
    for tensor in tiny.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * (0.3 if tensor.dim() > 1 else 1.0))
    return tiny.eval()


@dataclass
class Outcome:
    """Completion of one grammar-constrained submission."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def reason(self) -> FinishReason:
        assert self.finish is not None
        return self.finish.reason


def ask(uid: str, grammar: str | None, *, prompt: Sequence[int] = (72, 105), **params: Any) -> Submit:
    """Make a submission with a grammar, or without (None). `params`: other arguments of `make_submit`."""
    return msgspec.structs.replace(make_submit(uid, prompt, **{"max_tokens": 400, **params}), grammar=grammar)


def make_engine(**config: Any) -> Engine:
    """Make an engine that runs up to 64 sequences at once. `config` overrides fields of its `EngineConfig`."""
    values = {"num_blocks": 2000, "max_num_running": 64, "max_batched_tokens": 256, **config}
    return Engine(model(), TOKENIZER, EngineConfig(**values))


def drive(engine: Engine, submits: Iterable[Submit], stats: list[StepStats] | None = None) -> dict[str, Outcome]:
    """Submit all submissions to an engine, and step until no work is left. Add each step's statistics to `stats`."""
    outcomes: dict[str, Outcome] = {}
    for submit in submits:
        outcomes[submit.uid] = Outcome()
        engine.submit(submit)
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        if stats is not None:
            stats.append(result.stats)
        for delta in result.events:
            outcome = outcomes[delta.uid]
            outcome.text += delta.text
            outcome.token_ids += delta.token_ids
            outcome.deltas.append(delta)
            outcome.finish = delta.finish
    return outcomes


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` random JSON Schemas with all supported types of values.

    The length of their documents is bounded, because a model of random weights would never end a number.
    """
    rng = random.Random(seed)
    return [_object(rng, depth=2) for _ in range(count)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "name", "the age", "é", 'quote"', "x_1", "in", "z" * 12], rng.randint(1, 4))
    properties = {name: _part(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _part(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(0, 6)},
        {"type": "string", "minLength": 2, "maxLength": 4},
        {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$"])},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"enum": rng.sample(["red", "green", 3, None, True, 1.5, "ü"], 3)},
        {"const": rng.choice([7, "seven", False])},
        {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
    ]
    if depth > 0 and rng.random() < 0.5:
        nested: list[dict[str, Any]] = [
            _object(rng, depth - 1),
            {"type": "array", "items": _part(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2},
            {"type": "array", "prefixItems": [_part(rng, 0), _part(rng, 0)], "items": False, "minItems": 2},
            {"anyOf": [_part(rng, depth - 1), _part(rng, depth - 1)]},
        ]
        return rng.choice(nested)
    return rng.choice(leaves)
