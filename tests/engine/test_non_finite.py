"""A sequence with NaN or infinite values ends with an error, and other sequences stay bitwise identical.

One row of the model's embedding matrix is NaN, infinite, or so large that sums overflow. Only sequences with this
row's token (the poison token) fail.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import Any

import msgspec
import pytest
import torch

from model.attention.native import NativeAttention
from model.attention.paged import PagedAttention, gathered, one_by_one
from model.nn.linear import replace_linears
from model.nn.transformer import Transformer
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.execution.model_runner import ModelRunner
from service.engine.scheduling.scheduler import EngineConfig, Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import StepPlan
from service.ipc.messages import NON_FINITE, FinishReason, Pooling, Submit, TokenDelta
from tests.engine.fakes import call_again, make_submit
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of

TOKENIZER = train_bpe([], 300)
POISON = 0  # the padding rows of a step have this token, and are not finite either
BLOCK = 4
CONFIG: dict[str, Any] = {"block_size": BLOCK, "num_blocks": 60, "max_num_running": 8, "max_batched_tokens": 24}
BEST = list(BUILDABLE)[:1]
HUGE = 1e38
NATIVE = [
    ("float32", math.nan),
    ("float32", math.inf),
    ("float32", HUGE),
    ("bfloat16", math.nan),
    ("int8", math.nan),
    ("int4", math.nan),
]
ALL = [
    *(("native", *kind) for kind in NATIVE[:1] if BEST),
    *(("sdpa", *kind) for kind in NATIVE),
    ("eager", "float32", math.nan),
    ("paged", "float32", math.nan),
    ("paged", "bfloat16", HUGE),
]


def poisoned(backend: str, numbers: str, value: float, num_layers: int = 2) -> Transformer:
    config = dataclasses.replace(VARIANTS["rotary-mqa-untied"], num_layers=num_layers)
    model = build(config, backend if backend in ("sdpa", "eager") else "sdpa")
    with torch.no_grad():
        model.token_embedding.weight[POISON] = value
    if backend == "native":
        return natively(model, numbers)
    model = in_numbers(model, numbers)
    if backend == "paged":
        use(model, PagedAttention(gathered, one_by_one))
    return model


def natively(model: Transformer, numbers: str) -> Transformer:
    model = in_numbers(model, numbers)
    use(model, NativeAttention(library_of(BEST[0])))
    return model


def in_numbers(model: Transformer, numbers: str) -> Transformer:
    if numbers not in ("int8", "int4"):
        return model.to(getattr(torch, numbers))
    replace_linears(model, numbers)
    return model


def use(model: Transformer, attention: Any) -> None:
    for block in model.layers:
        block.attention.backend = attention  # type: ignore[union-attr]


class Answers:
    """Engine, with the events of each uid and totals of the statistics. Submissions arrive one per step or at once."""

    def __init__(self, model: Transformer, *, looks_ahead: bool = False, **config: Any) -> None:
        self.engine = Engine(model, TOKENIZER, EngineConfig(**{**CONFIG, **config}), looks_ahead=looks_ahead)
        self.events: dict[str, list[TokenDelta]] = {}
        self.num_non_finite = self.largest_batch = self.num_preemptions = self.num_accepted = 0

    def drive(self, submits: Ordered[Submit], *, at_once: bool = False) -> "Answers":
        waiting = list(submits)
        while waiting or self.engine.has_work:
            for submit in waiting[: None if at_once else 1]:
                self.engine.submit(submit)
                waiting.remove(submit)
            result = self.engine.step()
            self.engine.check_integrity()
            self.num_non_finite += result.stats.num_non_finite
            self.num_accepted += result.stats.num_accepted_tokens
            self.largest_batch = max(self.largest_batch, result.stats.batch_size)
            for event in result.events:
                self.events.setdefault(event.uid, []).append(event)
        assert result.stats.kv_usage == 0
        return self

    def reported(self, uid: str) -> list[object]:
        """Return all fields of a submission's events except times, with exact values."""
        found: list[object] = []
        for event in self.events[uid]:
            found += [*event.token_ids, event.text, *(event.logprobs or ()), event.embedding]
            found += event.prompt_logprobs or ()
            found.append(event.finish and event.finish.reason)
        return found

    def check_failed(self, uid: str) -> None:
        *before, last = self.events[uid]
        assert last.finish is not None
        assert (last.finish.reason, last.finish.error) == (FinishReason.ERROR, NON_FINITE)
        assert (last.token_ids, last.text, last.embedding, last.prompt_logprobs) == ((), "", None, None)
        entries = [entry for event in before for entry in event.logprobs or ()]
        assert all(entry.logprob is not None and math.isfinite(entry.logprob) for entry in entries)


def good(count: int, seed: int) -> list[Submit]:
    """Make submissions without the poison token: greedy and seeded completions, embeddings and prompt logprobs."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(1, 256) for _ in range(rng.randint(1, 30))]
        params: dict[str, Any] = {"temperature": number % 2, "seed": number, "logprobs": 2, "ignore_eos": True}
        if number % 5 == 3:
            made.append(
                msgspec.structs.replace(
                    make_submit(f"g{number}", prompt, max_tokens=0), pooling=rng.choice(list(Pooling))
                )
            )
            continue
        params["prompt_logprobs"] = 1 if number % 5 == 4 else None
        params["bad_word_ids"] = ((POISON,),)
        made.append(make_submit(f"g{number}", prompt, max_tokens=rng.randint(2, 20), **params))
    return made


def with_token(submits: Ordered[Submit], token_id: int, place: Callable[[int], int]) -> list[Submit]:
    """Copy submissions under other uids, with `token_id` inserted in the prompt at `place(prompt length)`."""
    made = []
    for submit in submits:
        ids = list(submit.prompt_token_ids)
        ids.insert(place(len(ids)), token_id)
        uid = submit.uid.replace("g", "b")
        made.append(msgspec.structs.replace(submit, uid=uid, prompt_token_ids=tuple(ids)))
    return made


def forced(uid: str) -> Submit:
    """Make a submission that samples the poison token: its first step is finite, its second step is not."""
    return make_submit(uid, [5, 6, 7], max_tokens=9, allowed_token_ids=(POISON,), temperature=0.0, logprobs=1)


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("numbers", "value"), NATIVE)
@pytest.mark.parametrize("level", BEST)
def test_native_kernels_are_batch_invariant_beside_non_finite_sequences(
    level: str, numbers: str, value: float, cache_dtype: str
) -> None:
    """Cover batches in random order, prompt chunks and reused blocks."""
    rng = random.Random(2)
    healthy, ill = good(10, seed=1), with_token(good(6, seed=2), POISON, lambda length: rng.randint(0, length))
    mixed = [*healthy, *ill, forced("forced")]
    rng.shuffle(mixed)
    together = Answers(poisoned("native", numbers, value), kv_cache_dtype=cache_dtype).drive(mixed)
    apart = Answers(poisoned("native", numbers, value), kv_cache_dtype=cache_dtype).drive(healthy)
    assert together.largest_batch > 3
    for submit in healthy:
        assert together.reported(submit.uid) == apart.reported(submit.uid), submit.uid
    for submit in [*ill, forced("forced")]:
        together.check_failed(submit.uid)
    assert [event.token_ids for event in together.events["forced"]] == [(POISON,), ()]
    assert (together.num_non_finite, apart.num_non_finite) == (len(ill) + 1, 0)


@pytest.mark.parametrize(("backend", "numbers", "value"), ALL)
def test_non_finite_sequences_do_not_change_the_bits_of_other_sequences(
    backend: str, numbers: str, value: float
) -> None:
    """PyTorch's results depend on the shape of a step, so both runs have steps of the same shapes."""
    healthy = good(10, seed=1)
    once = [dataclasses.replace(submit.params, max_tokens=min(1, submit.params.max_tokens)) for submit in healthy]
    short = [msgspec.structs.replace(submit, params=params) for submit, params in zip(good(10, 2), once, strict=True)]
    answers = []
    for token_id in (POISON, POISON + 1):
        others = with_token(short, token_id, lambda length: length)
        submits = [each for pair in zip(healthy, others, strict=True) for each in pair]
        answers.append(Answers(poisoned(backend, numbers, value)).drive(submits))
    beside_ill, beside_healthy = answers
    assert beside_ill.largest_batch > 3
    for submit in healthy:
        assert beside_ill.reported(submit.uid) == beside_healthy.reported(submit.uid), submit.uid
    for number in range(len(short)):
        beside_ill.check_failed(f"b{number}")
    assert (beside_ill.num_non_finite, beside_healthy.num_non_finite) == (len(short), 0)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "paged"])
def test_a_sequence_that_shares_non_finite_blocks_is_recomputed(backend: str) -> None:
    """PyTorch's attention also makes earlier positions of the same prompt NaN, because 0 * NaN is NaN.

    Sequence g shares blocks with the failing sequence b, so g is preempted and recomputed. The later sequence h must
    not reuse the blocks that g wrote in that step. The model has three layers: the first makes outputs NaN, the second
    the shared keys and values, the third those of g.
    """
    common, rest = list(range(20, 20 + 3 * BLOCK)), list(range(40, 41 + BLOCK))
    params: dict[str, Any] = {"temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    ill = make_submit("b", [*common, POISON, 9], **params)
    healthy = make_submit("g", [*common, *rest], **params)
    later = make_submit("h", [*common, *rest, 3], **params)
    together = Answers(poisoned(backend, "float32", math.nan, 3), max_batched_tokens=64)
    together.drive([ill, healthy], at_once=True).drive([later])
    alone = Answers(poisoned(backend, "float32", math.nan, 3), max_batched_tokens=64).drive([healthy]).drive([later])
    together.check_failed("b")
    assert [together.reported(uid) for uid in "gh"] == [alone.reported(uid) for uid in "gh"]
    first, second = (together.events[uid][-1].finish for uid in "gh")
    assert first is not None
    assert second is not None
    assert (first.num_preemptions, second.num_cached_tokens) == (1, 4 * BLOCK)


@pytest.mark.parametrize("backend", [*(["native"] if BEST else []), "sdpa", "eager"])
def test_blocks_of_a_non_finite_step_leave_the_prefix_cache(backend: str) -> None:
    common = list(range(20, 20 + 3 * BLOCK))
    answers = Answers(poisoned(backend, "float32", math.nan), max_batched_tokens=64)
    answers.drive([make_submit("b0", [*common, POISON, 9])])
    for number, healthy in enumerate(([*common, 7, 8], common)):
        answers.drive([make_submit(f"g{number}", healthy, logprobs=0, ignore_eos=True)])
    answers.drive([make_submit("b1", [*common, POISON, 9])])
    for uid in ("b0", "b1"):
        answers.check_failed(uid)
    finishes = [answers.events[uid][-1].finish for uid in ("b0", "g0", "g1", "b1")]
    assert [finish and finish.num_cached_tokens for finish in finishes] == [0, 0, 2 * BLOCK, 3 * BLOCK]
    entries = [entry for event in answers.events["g1"] for entry in event.logprobs or ()]
    assert len(entries) == 8
    assert all(entry.logprob is not None and math.isfinite(entry.logprob) for entry in entries)


def test_non_finite_values_in_captured_steps_launched_ahead_end_the_sequence() -> None:
    """The next step is launched with the non-finite sequence before the host has read the non-finite values."""
    answers = []
    healthy = [
        make_submit(f"g{number}", [20 + number, 30], max_tokens=20, temperature=0.0, ignore_eos=True)
        for number in range(4)
    ]
    for token_id in (POISON, POISON + 1):
        model = poisoned("paged", "float32", math.nan)
        runner = ModelRunner(model, num_blocks=60, block_size=BLOCK, vocab_size=TOKENIZER.vocab_size)
        runner._model.token_embedding.weight[POISON], kept = 0.0, runner._model.token_embedding.weight[POISON].clone()
        runner.capture_decodes(call_again, max_rows=8, max_context_length=64)
        runner._model.token_embedding.weight[POISON] = kept
        ahead = Answers(model)
        ahead.engine = Engine(model, TOKENIZER, EngineConfig(**CONFIG), runner=runner, looks_ahead=True)
        late = make_submit("b", [5, token_id], max_tokens=1 if token_id else 9, temperature=0.0)
        answers.append(ahead.drive([*healthy, late], at_once=True))
    answers[0].check_failed("b")
    for submit in healthy:
        assert answers[0].reported(submit.uid) == answers[1].reported(submit.uid)
    assert answers[0].num_non_finite == 1


@pytest.mark.parametrize(
    ("non_finite", "ended", "num_added"),
    [({2}, [], 2), ({1, 3}, [], 1), ({0, 2}, ["a"], 0), ({8}, ["b"], 4), ({9, 11}, [], 4), (set(), [], 4)],
)
def test_a_draft_is_cut_before_its_first_non_finite_token(
    non_finite: set[int], ended: list[str], num_added: int
) -> None:
    """A non-finite draft token ends no sequence. If the same token is sampled, the next step detects the failure."""
    config = EngineConfig(block_size=4, num_blocks=40, max_num_running=4, max_batched_tokens=40)
    scheduler = Scheduler(config, max_context_length=64)
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 9, 9, 9, 9]}
    for number, (uid, prompt) in enumerate(prompts.items()):
        submit = make_submit(uid, prompt, max_tokens=20)
        scheduler.add(SequenceState(submit, arrival_number=number, max_context_length=64))
    first, second = scheduler.schedule().chunks
    sequence, _ = scheduler.sequences()
    sequence.num_computed_tokens = 4
    drafted = msgspec.structs.replace(first, start=4, num_tokens=4, token_ids=[5], draft=(7, 8, 9))
    plan = StepPlan(chunks=(drafted, msgspec.structs.replace(second, samples=False)))
    assert [failed.uid for failed in scheduler.end_non_finite(plan, frozenset(non_finite))] == ended
    scheduler.commit(plan, [7, 8, 9, 10], frozenset(non_finite))
    assert len(sequence.token_ids) == 5 + num_added


@pytest.mark.parametrize("level", BEST)
def test_a_decode_step_detects_a_hidden_state_whose_norm_overflows(level: str) -> None:
    """The norm turns a hidden state whose squares overflow into zeros, so the logits alone would be finite."""
    answers = Answers(poisoned("native", "float32", HUGE)).drive([forced("b")])
    answers.check_failed("b")
    assert [event.token_ids for event in answers.events["b"]] == [(POISON,), ()]


@pytest.mark.parametrize("level", BEST)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantization_does_not_hide_an_overflow_inside_a_layer(level: str, kind: str) -> None:
    """The failure begins inside an MLP, where infinity times 0 is NaN; the MLP's input is finite."""
    model = poisoned("sdpa", "float32", 0.0)
    block: Any = model.layers[0]
    weight = block.mlp.gate_up.weight
    weight[0], weight[len(weight) // 2] = 3e38, 0.0
    answers = Answers(natively(model, kind))
    answers.drive([make_submit("b", [5, 6, 7], temperature=0.0)])
    answers.check_failed("b")
