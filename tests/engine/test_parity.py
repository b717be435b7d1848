"""The engine's tokens equal those of a pass without a KV-cache: batched, chunked, preempted, prefix-cached.

All tokens of float32 models are compared, greedy and seeded. Each test also asserts that, for example, preemptions
did occur.
"""

import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model.attention.metadata import AttentionMetadata
from model.nn.reference_generate import generate
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from model.sampling.sampler import NO_TOKEN, sample
from model.sampling.token_constraints import TokenRules
from model.tokenizer.interface import StreamDecoder
from model.training.data.bpe import train_bpe
from service.engine.engine import Engine
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import FinishReason, StepStats, Submit, TokenDelta
from tests.engine.fakes import make_submit
from tests.model.configs import VARIANTS, build

TOKENIZER = train_bpe([(Path(__file__).parents[1] / "data" / "aesop.txt").read_text()], 300)
(EOS,) = TOKENIZER.eos_token_ids
# Each way of positions. Any other mechanism reads the cache as these do, in chunks that one run per variant covers.
SCHEDULED = ("rotary-gqa", "gpt2", "relative-bias-window", "disentangled", "gemma2", "average")


@functools.cache
def model_of(name: str) -> Transformer:
    """Return the model of a variant; "eager": that of rotary-gqa with the reference attention."""
    return build(VARIANTS["rotary-gqa"], "eager") if name == "eager" else build(VARIANTS[name])


@torch.inference_mode()
def reference_completion(model: Transformer, submit: Submit, completion: list[int]) -> list[int]:
    """Return what `generate` returns if `completion` is right: by one pass without a KV-cache, not one per token.

    Each token is sampled after the given tokens before it, and one more after the last. So a wrong completion differs
    from the result at its first wrong token or at its end.
    """
    prompt, params = submit.prompt_token_ids, submit.params
    ids = [*prompt, *completion]
    logits_TV = model(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)[len(prompt) - 1 :]
    ends = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, EOS}
    begun = [completion[:count] for count in range(len(completion) + 1)]
    rules = [TokenRules(params, prompt, tokens) if params.has_token_rules else None for tokens in begun]
    forbidden = [
        [*(ends if len(tokens) < params.min_tokens else ()), *(rule.forbidden if rule else ())]
        for tokens, rule in zip(begun, rules, strict=True)
    ]
    positions = range(len(prompt), len(ids) + 1)
    sampled = sample(logits_TV, [params] * len(begun), positions, forbidden=forbidden, rules=rules).tolist()
    limit = min(params.max_tokens, model.config.max_context_length - len(prompt))
    last = next((count for count, token in enumerate(sampled, 1) if token in ends), limit)
    return list(itertools.takewhile(lambda token: token != NO_TOKEN, sampled[: min(last, limit)]))


class Run:
    """Engine of a tiny model, with the events of each uid and the statistics of each step."""

    def __init__(self, name: str, **config: int | bool) -> None:
        values = {"block_size": 4, "num_blocks": 200, "max_num_running": 16, "max_batched_tokens": 64, **config}
        self.model = model_of(name)
        self.engine = Engine(self.model, TOKENIZER, EngineConfig(**values))  # type: ignore[arg-type]
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.stats: list[StepStats] = []

    def drive(self, submits: Sequence[Submit], every: int = 0) -> None:
        waiting = list(submits)
        while waiting or self.engine.has_work:
            for _ in range(1 if every else len(waiting)):
                if waiting and (not every or len(self.stats) % every == 0):
                    self.engine.submit(waiting.pop(0))
            result = self.engine.step()
            self.engine.check_integrity()
            self.stats.append(result.stats)
            for delta in result.events:
                self.deltas.setdefault(delta.uid, []).append(delta)
        assert result.stats.kv_usage == 0

    def token_ids(self, uid: str) -> list[int]:
        return [token_id for delta in self.deltas[uid] for token_id in delta.token_ids]

    def text(self, uid: str) -> str:
        return "".join(delta.text for delta in self.deltas[uid])

    def check(self, submits: Sequence[Submit]) -> None:
        for submit in submits:
            expected = reference_completion(self.model, submit, self.token_ids(submit.uid))
            assert self.token_ids(submit.uid) == expected
            decoder = StreamDecoder(TOKENIZER)
            shown = [token_id for token_id in expected if token_id not in submit.params.stop_token_ids]
            assert self.text(submit.uid) == decoder.push(shown) + decoder.flush()
            *earlier, last = self.deltas[submit.uid]
            assert all(delta.finish is None for delta in earlier)
            assert last.finish is not None


def submissions(count: int, seed: int, *, max_prompt: int = 40) -> list[Submit]:
    """Make submissions of mixed lengths, greedy and seeded, with all sampling filters."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = rng.randint(1, max_prompt)
        greedy = rng.random() < 0.4
        made.append(
            make_submit(
                f"s{number}",
                [rng.randrange(EOS) for _ in range(length)],
                max_tokens=rng.randint(1, 64 - length),
                temperature=0.0 if greedy else rng.choice([0.7, 1.0, 1.5]),
                top_k=rng.choice([0, 0, 20]),
                top_p=rng.choice([1.0, 0.9]),
                min_p=rng.choice([0.0, 0.02]),
                seed=rng.randrange(2**64),
                ignore_eos=rng.random() < 0.7,
                min_tokens=0,
                stop_token_ids=tuple(rng.sample(range(EOS), 3)) if rng.random() < 0.3 else (),
            )
        )
    return made


@pytest.mark.parametrize(
    ("name", "budget", "every"),
    [(name, 23, 2) for name in VARIANTS] + [(name, budget, 0) for name in SCHEDULED for budget in (16, 64)],
)
def test_random_batches_and_chunks_equal_the_reference(name: str, budget: int, every: int) -> None:
    submits = submissions(20, seed=budget + every)
    run = Run(name, max_batched_tokens=budget)
    run.drive(submits, every)
    run.check(submits)
    assert max(stats.batch_size for stats in run.stats) > 4
    assert max(stats.num_prompt_tokens + stats.num_completion_tokens for stats in run.stats) > budget // 2


@pytest.mark.parametrize("name", SCHEDULED)
def test_preempted_sequences_equal_the_reference(name: str) -> None:
    submits = submissions(14, seed=5, max_prompt=20)
    run = Run(name, num_blocks=20, enable_prefix_cache=False)
    run.drive(submits)
    run.check(submits)
    assert sum(stats.num_preemptions for stats in run.stats) > 3


@pytest.mark.parametrize("name", SCHEDULED)
def test_prefix_hits_equal_the_reference(name: str) -> None:
    rng = random.Random(6)
    shared = [rng.randrange(EOS) for _ in range(21)]
    submits = [
        make_submit(str(number), [*shared[: rng.randint(10, 21)], number], max_tokens=12, seed=number, ignore_eos=True)
        for number in range(12)
    ]
    run = Run(name, max_batched_tokens=16)
    run.drive(submits, every=1)
    run.check(submits)
    assert sum(stats.num_prefix_hits for stats in run.stats) > 50
    cached = [delta.finish.num_cached_tokens for deltas in run.deltas.values() for delta in deltas if delta.finish]
    assert sum(cached) == sum(stats.num_cached_prompt_tokens for stats in run.stats)


@pytest.mark.parametrize("name", ["rotary-gqa", "eager"])
def test_sequences_in_a_pool_that_is_too_small_equal_the_reference(name: str) -> None:
    submits = submissions(24, seed=8, max_prompt=30)
    submits += [make_submit(f"again-{s.uid}", s.prompt_token_ids, max_tokens=6, seed=1) for s in submits[:8]]
    run = Run(name, num_blocks=24, max_batched_tokens=17)
    run.drive(submits, every=1)
    run.check(submits)
    assert sum(stats.num_preemptions for stats in run.stats) > 0
    assert sum(stats.num_prefix_hits for stats in run.stats) > 0


def test_a_resubmitted_sequence_continues_after_its_prior_tokens() -> None:
    """A second engine continues a completion after prior tokens with the same tokens, text and token indexes."""
    submits = submissions(8, seed=9)
    whole = Run("rotary-gqa")
    whole.drive(submits)
    for cut in (1, 5, 11):
        second = Run("rotary-gqa")
        again = []
        for submit in submits:
            ids = whole.token_ids(submit.uid)[:-1][:cut]
            again.append(
                Submit(
                    uid=submit.uid,
                    attempt=1,
                    prompt_token_ids=submit.prompt_token_ids,
                    prior_token_ids=tuple(ids),
                    params=submit.params,
                    arrival_seconds=0.0,
                )
            )
        second.drive(again)
        for submit in again:
            count = len(submit.prior_token_ids)
            assert second.deltas[submit.uid][0].index == count
            assert [*submit.prior_token_ids, *second.token_ids(submit.uid)] == whole.token_ids(submit.uid)
            shown = "".join(delta.text for delta in whole.deltas[submit.uid] if delta.index < count)
            assert shown + second.text(submit.uid) == whole.text(submit.uid)


def test_min_tokens_and_stop_tokens_equal_the_reference() -> None:
    submits = [
        make_submit(
            str(seed),
            [1, 2, 3],
            max_tokens=40,
            min_tokens=seed % 7,
            stop_token_ids=tuple(range(seed, seed + 60)),
            seed=seed,
        )
        for seed in range(12)
    ]
    run = Run("gpt2")
    run.drive(submits)
    run.check(submits)
    for submit in submits:
        expected = generate(run.model, submit.prompt_token_ids, submit.params, eos_token_ids=(EOS,))
        assert run.token_ids(submit.uid) == expected
    reasons = [deltas[-1].finish for deltas in run.deltas.values()]
    assert any(finish and finish.stop_reason is not None for finish in reasons)


def test_a_stop_string_ends_a_sequence_and_is_cut_from_its_text_unless_included() -> None:
    whole = Run("rotary-gqa")
    base = make_submit("a", [5, 6, 7], max_tokens=50, temperature=0.0, ignore_eos=True)
    whole.drive([base])
    text = whole.text("a")
    stop = text[10:13]
    assert stop
    first = text.index(stop)
    for include in (False, True):
        run = Run("rotary-gqa")
        params: dict[str, Any] = {"max_tokens": 50, "temperature": 0.0, "ignore_eos": True, "stop": (stop,)}
        run.drive([make_submit("b", [5, 6, 7], include_stop_str_in_output=include, **params)])
        assert run.text("b") == text[: first + (len(stop) if include else 0)]
        finish = run.deltas["b"][-1].finish
        assert finish is not None
        assert (finish.reason, finish.stop_reason) == (FinishReason.STOP, stop)
        assert finish.num_completion_tokens == len(run.token_ids("b")) < 50


def test_logprobs_equal_those_of_an_uncached_forward_pass() -> None:
    model = model_of("gpt2")
    submits = [
        make_submit("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=9, logprobs=3, prompt_logprobs=2, seed=1, ignore_eos=True),
        make_submit("b", [9, 8], max_tokens=9, seed=2),
        make_submit("c", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=5, logprobs=0, seed=3, ignore_eos=True),
    ]
    run = Run("gpt2", max_batched_tokens=16)
    run.drive(submits)
    ids = [*submits[0].prompt_token_ids, *run.token_ids("a")]
    logits = model(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)
    expected = logits.log_softmax(-1)
    prompt = run.deltas["a"][0].prompt_logprobs
    assert prompt is not None
    assert prompt[0].logprob is None
    scored = [*prompt[1:], *(entry for delta in run.deltas["a"] for entry in delta.logprobs or ())]
    assert [entry.token_id for entry in scored] == ids[1:]
    for row, entry in enumerate(scored):
        assert entry.logprob == pytest.approx(float(expected[row, ids[row + 1]]), abs=1e-4)
        assert entry.logprob is not None
        assert entry.rank is not None
        surely, perhaps = (int((expected[row] > entry.logprob + margin).sum()) for margin in (1e-4, -1e-4))
        assert surely < entry.rank <= perhaps
        count = 2 if row < 6 else 3
        assert [token for token, _ in entry.top] == expected[row].topk(count).indices.tolist()
    assert all(delta.logprobs is None and delta.prompt_logprobs is None for delta in run.deltas["b"])
    assert all(delta.logprobs is not None and delta.logprobs[0].top == () for delta in run.deltas["c"])


def test_prompt_logprobs_are_reported_once_after_a_preemption() -> None:
    """A sequence preempted between chunks of its prompt reports the logprob of each prompt token once."""
    run = Run("gpt2", num_blocks=11, max_batched_tokens=4, max_num_running=4)
    prompt = list(range(20))
    crowd = [make_submit(str(i), [i + 1] * 3, max_tokens=16, ignore_eos=True, seed=i) for i in range(2)]
    run.drive([*crowd, make_submit("scored", prompt, max_tokens=3, prompt_logprobs=0, ignore_eos=True)], every=2)
    deltas = run.deltas["scored"]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.num_preemptions > 0
    scores = deltas[0].prompt_logprobs
    assert scores is not None
    assert [entry.token_id for entry in scores] == prompt
    logits = run.model(torch.tensor(prompt), AttentionMetadata.uncached((20,)), None)
    expected = logits.log_softmax(-1)[range(19), prompt[1:]].tolist()
    assert [entry.logprob for entry in scores[1:]] == pytest.approx(expected, abs=1e-4)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_samples_of_one_prompt_share_its_blocks() -> None:
    submits = [make_submit(str(seed), range(30), max_tokens=8, seed=seed, ignore_eos=True) for seed in range(8)]
    run = Run("rotary-gqa", max_batched_tokens=128)
    run.drive(submits)
    run.check(submits)
    # In the first step, the first sequence computes the whole prompt. The other seven compute only the two tokens
    # after the shared full blocks.
    assert run.stats[0].batch_size == 8
    assert run.stats[0].num_prompt_tokens == 30 + 7 * 2


@pytest.mark.parametrize("budget", [16, 64])
def test_a_prompt_is_scored_with_max_tokens_0(budget: int) -> None:
    """Prompt logprobs are computed whole or in chunks, without the prefix cache, which holds no logits."""
    prompt = list(range(40))
    run = Run("rotary-gqa", max_batched_tokens=budget)
    for uid in ("a", "b"):
        run.drive([make_submit(uid, prompt, max_tokens=0, prompt_logprobs=1)])
        (delta,) = run.deltas[uid]
        assert delta.token_ids == ()
        assert delta.finish is not None
        assert delta.finish.reason is FinishReason.LENGTH
        assert delta.prompt_logprobs is not None
        assert [entry.token_id for entry in delta.prompt_logprobs] == prompt
    assert sum(stats.num_prefix_hits for stats in run.stats) == 0


def test_logprobs_alone_and_in_a_batch_are_close() -> None:
    """Logprobs of PyTorch's kernels alone and in a batch differ by less than 1e-5, see `MIN_ROWS`."""
    submits = submissions(10, seed=12, max_prompt=12)
    params: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    submits = [make_submit(s.uid, s.prompt_token_ids, seed=s.params.seed, **params) for s in submits]
    crowd = Run("rotary-gqa", enable_prefix_cache=False)
    crowd.drive(submits)
    for submit in submits[:4]:
        alone = Run("rotary-gqa", enable_prefix_cache=False)
        alone.drive([submit])
        for one, many in zip(alone.deltas[submit.uid], crowd.deltas[submit.uid], strict=True):
            assert one.token_ids == many.token_ids
            assert one.logprobs is not None
            assert many.logprobs is not None
            assert one.logprobs[0].logprob == pytest.approx(many.logprobs[0].logprob, abs=1e-5)


def test_ids_beyond_the_vocabulary_are_never_sampled() -> None:
    """The embedding matrix of this model is padded beyond the vocabulary."""
    small = train_bpe([], 257)
    engine = Engine(model_of("gpt2"), small, EngineConfig(num_blocks=40))
    for seed in range(8):
        engine.submit(
            make_submit(str(seed), [1], max_tokens=40, temperature=5.0, seed=seed, logprobs=5, ignore_eos=True)
        )
    sampled = [delta for _ in range(40) for delta in engine.step().events]
    assert len(sampled) == 8 * 40
    assert max(token_id for delta in sampled for token_id in delta.token_ids) < 257
    assert max(token for delta in sampled for entry in delta.logprobs or () for token, _ in entry.top) < 257


def test_greedy_sequences_ignore_the_seed() -> None:
    run = Run("gpt2")
    run.drive([make_submit(str(seed), [1], temperature=0.0, seed=seed, ignore_eos=True) for seed in range(3)])
    assert run.token_ids("0") == run.token_ids("1") == run.token_ids("2")
    assert SamplingParams(max_tokens=1, temperature=0.0).greedy
