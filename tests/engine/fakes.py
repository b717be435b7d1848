"""Small engines over a `FakeRunner`, submissions to these engines, and the tokens that they must return."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from model.sampling.params import SamplingParams
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.execution.model_runner import ModelRunner
from service.engine.scheduling.scheduler import EngineConfig
from service.engine.scheduling.step_plan import MIN_ROWS
from service.ipc.messages import Submit
from tests.engine.fake_runner import FakeRunner, next_token

VOCAB_SIZE = 257
EOS = 256
# The maximum length of a sequence in `make_engine`.
CONTEXT = 24
_TOKENIZER = train_bpe([], 257)
_MODEL: Any = SimpleNamespace(config=SimpleNamespace(max_context_length=CONTEXT))


def expected_tokens(submit: Submit, max_context_length: int) -> list[int]:
    """Return the completion that a `FakeRunner` must sample for a submission, computed here without an engine."""
    params, history = submit.params, list(submit.prompt_token_ids)
    ends = set(params.stop_token_ids) if params.ignore_eos else {*params.stop_token_ids, EOS}
    sampled: list[int] = []
    while len(sampled) < params.max_tokens and len(history) < max_context_length:
        forbidden = sorted(ends) if len(sampled) < params.min_tokens else []
        begun = [(tuple(sampled[len(sampled) - len(word) + 1 :]), word) for word in params.bad_word_ids]
        forbidden += [word[-1] for before, word in begun if before == word[:-1]]
        sampled.append(next_token(history, params.seed, forbidden, VOCAB_SIZE))
        history.append(sampled[-1])
        if sampled[-1] in ends:
            break
    return sampled


def make_submit(
    uid: str,
    prompt: Sequence[int],
    *,
    attempt: int = 0,
    prior: Sequence[int] = (),
    deadline: float | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    namespace: str = "",
    **params: object,
) -> Submit:
    """Make a submission with defaults for the fields that are not given. `params`: fields of `SamplingParams`."""
    return Submit(
        uid=uid,
        attempt=attempt,
        prompt_token_ids=tuple(prompt),
        prior_token_ids=tuple(prior),
        params=SamplingParams(**{"max_tokens": 8, **params}),  # type: ignore[arg-type]
        arrival_seconds=arrival,
        deadline_seconds=deadline,
        priority=priority,
        cache_salt=salt,
        cache_namespace=namespace,
    )


def make_engine(**changes: Any) -> tuple[Engine, FakeRunner]:
    """Make a small engine over a `FakeRunner`. `changes` override fields of its `EngineConfig`, with four exceptions.

    fakes_time: the engine reads the runner's simulated clock. looks_ahead: argument of `Engine`.
    min_rows, fail_at: argument and attribute of `FakeRunner`.
    """
    values = {"block_size": 2, "num_blocks": 14, "max_num_running": 4, "max_batched_tokens": 7, **changes}
    min_rows = values.pop("min_rows", MIN_ROWS)
    runner = FakeRunner(values["num_blocks"], values["block_size"], VOCAB_SIZE, min_rows)
    runner.fail_at = values.pop("fail_at", None)
    clock = runner.clock if values.pop("fakes_time", False) else time.monotonic
    looks_ahead = values.pop("looks_ahead", None)
    config = EngineConfig(**values)
    return Engine(
        _MODEL, _TOKENIZER, config, runner=cast(ModelRunner, runner), looks_ahead=looks_ahead, clock=clock
    ), runner


def call_again(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand-in for CUDA graph capture on any device: return a function that calls `compute` again."""
    result = compute()

    def replay() -> Tensor:
        return result.copy_(compute())

    return replay
