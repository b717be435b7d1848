"""Completions are equal with and without launching steps ahead, for all kinds of requests."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from model.attention.paged import PagedAttention, gathered, one_by_one
from service.engine.engine import Engine
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner, StepOutputs
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import Submit, TokenDelta
from tests.engine.fakes import call_again, make_submit
from tests.engine.test_parity import EOS, TOKENIZER
from tests.model.configs import VARIANTS, attention_layers, build

GRAMMAR = LLMatcher.grammar_from_lark('start: ("a" | "b" | "c"){1,9} "."')


class Counting(ModelRunner):
    """Model runner that counts launched steps, and launched steps whose input tokens only the device knows."""

    num_launched = num_ahead = num_run = 0

    def launch(self, inputs: ModelInputs) -> Callable[[], StepOutputs]:
        self.num_launched += 1
        self.num_ahead += bool(inputs.previous_rows)
        return super().launch(inputs)

    def run(self, inputs: ModelInputs) -> Any:
        self.num_run += 1
        return super().run(inputs)


def engine(looks_ahead: bool, *, records: bool = False, **config: Any) -> tuple[Engine, Counting]:
    model = build(VARIANTS["rotary-gqa"])
    for attention in attention_layers(model):
        attention.backend = PagedAttention(gathered, one_by_one)
    values = {"block_size": 4, "num_blocks": 200, "max_num_running": 8, "max_batched_tokens": 24, **config}
    runner = Counting(
        model, num_blocks=values["num_blocks"], block_size=values["block_size"], vocab_size=TOKENIZER.vocab_size
    )
    if records:
        runner.capture_decodes(call_again, max_rows=8, max_context_length=64)
    return Engine(model, TOKENIZER, EngineConfig(**values), runner=runner, looks_ahead=looks_ahead), runner


def requests(seed: int, *, plain: float) -> list[Submit]:
    """Make submissions of mixed lengths and stop conditions, many with a shared prefix."""
    rng = random.Random(seed)
    beginning = [rng.randrange(EOS) for _ in range(18)]
    made = []
    for number in range(18):
        prompt = rng.choice([beginning, []]) + [rng.randrange(EOS) for _ in range(rng.randint(1, 14))]
        params: dict[str, Any] = {
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0.0, 0.8, 1.0]),
            "top_k": rng.choice([0, 20]),
            "min_p": rng.choice([0.0, 0.02]),
            "top_p": rng.choice([0.8, 1.0]),
            "seed": rng.randrange(2**64),
            "ignore_eos": rng.random() < 0.7,
            "stop_token_ids": tuple(rng.sample(range(EOS), 8)) if rng.random() < 0.4 else (),
            "stop": rng.choice([(), ("e",), ("th", " a")]),
        }
        grammar = None
        if rng.random() > plain:
            params |= rng.choice(
                [
                    {"logprobs": 2},
                    {"prompt_logprobs": 1},
                    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
                    {"min_tokens": min(4, params["max_tokens"]), "ignore_eos": False},
                    {"bad_word_ids": ((1,), (2, 3))},
                    {},
                ]
            )
            grammar = rng.choice([GRAMMAR, None, None])
        submit = make_submit(f"s{number}", prompt, arrival=float(number), **params)
        made.append(msgspec.structs.replace(submit, grammar=grammar))
    return made


def answers(engine: Engine, submits: Sequence[Submit], seed: int) -> tuple[dict[str, list[Any]], int]:
    """Run submissions that arrive every third step. Return the events of each uid, and the number of preemptions.

    A random fifth of the submissions is cancelled after one to eight events.
    """
    rng = random.Random(seed)
    cancelled = {submit.uid: rng.randint(1, 8) for submit in submits if rng.random() < 0.2}
    waiting, number, num_preemptions = list(submits), 0, 0
    reported: dict[str, list[TokenDelta]] = {submit.uid: [] for submit in submits}
    while waiting or engine.has_work:
        if waiting and number % 3 == 0:
            engine.submit(waiting.pop(0))
        result = engine.step()
        num_preemptions += result.stats.num_preemptions
        for event in result.events:
            reported[event.uid].append(event)
            if len(reported[event.uid]) == cancelled.get(event.uid) and event.finish is None:
                engine.cancel(event.uid)
        engine.check_integrity()
        number += 1
    assert engine.step().stats.kv_usage == 0
    return {uid: [piece(event) for event in events] for uid, events in reported.items()}, num_preemptions


def piece(event: TokenDelta) -> Any:
    """Return the fields of an event without times, with logprobs rounded to four digits, to compare two runs."""
    finish = event.finish
    end = None if finish is None else (finish.reason, finish.stop_reason, finish.error, finish.num_completion_tokens)
    scores = [
        (entry.token_id, None if entry.logprob is None else round(entry.logprob, 4), entry.rank)
        for entry in (*(event.logprobs or ()), *(event.prompt_logprobs or ()))
    ]
    return event.attempt, event.index, event.token_ids, event.text, scores, end


@pytest.mark.parametrize(
    ("plain", "records", "config"),
    [
        pytest.param(1.0, False, {}, id="plain"),
        pytest.param(1.0, True, {}, id="recorded"),
        pytest.param(0.6, False, {}, id="mixed"),
        pytest.param(0.9, True, {"num_blocks": 16, "enable_prefix_cache": False}, id="preempted"),
        pytest.param(1.0, False, {"max_num_running": 3, "block_size": 1}, id="waiting"),
    ],
)
def test_completions_with_and_without_lookahead_are_equal(plain: float, records: bool, config: dict[str, Any]) -> None:
    num_ahead = num_run = num_preemptions = 0
    for seed in range(3):
        submits = requests(seed, plain=plain)
        without, runner = engine(False, records=records, **config)
        expected, _ = answers(without, submits, seed)
        assert runner.num_launched == 0
        looking, runner = engine(True, records=records, **config)
        found, count = answers(looking, submits, seed)
        assert found == expected, [(uid, found[uid], expected[uid]) for uid in found if found[uid] != expected[uid]]
        num_ahead, num_run = num_ahead + runner.num_ahead, num_run + runner.num_run
        num_preemptions += count
    assert num_ahead > 20
    assert plain == 1.0 or num_run > 20
    assert (num_preemptions > 0) == ("num_blocks" in config)
