"""Embeddings equal those of one uncached forward pass: batched, in chunks, preempted, and with prefix hits."""

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.attention.metadata import AttentionMetadata
from model.nn.transformer import Transformer
from service.ipc.messages import FinishReason, Pooling, Submit
from tests.engine.fakes import make_submit
from tests.engine.test_parity import EOS, Run, submissions
from tests.model.configs import VARIANTS


def texts(count: int, seed: int, *, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(EOS) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def asked(uid: str, token_ids: Sequence[int], pooling: Pooling) -> Submit:
    return msgspec.structs.replace(make_submit(uid, token_ids, max_tokens=0), pooling=pooling)


@torch.inference_mode()
def computed(model: Transformer, token_ids: Sequence[int], pooling: Pooling) -> NDArray[np.float32]:
    """Return the embedding of a text, computed by one forward pass without a KV-cache."""
    hidden_TE = model.hidden(torch.tensor(token_ids), AttentionMetadata.uncached((len(token_ids),)), None)
    normed_TE = model.final_norm(hidden_TE)
    pooled_E = normed_TE.mean(0) if pooling is Pooling.MEAN else normed_TE[-1]
    vector: NDArray[np.float32] = (pooled_E / pooled_E.norm()).numpy()
    return vector


def reported(run: Run, uid: str) -> NDArray[np.float32]:
    """Return the embedding of a text that an engine has reported, in a single event."""
    (delta,) = run.deltas[uid]
    assert (delta.token_ids, delta.text, delta.logprobs) == ((), "", None)
    assert delta.finish is not None
    assert delta.finish.reason is FinishReason.LENGTH
    assert delta.finish.num_completion_tokens == 0
    assert delta.finish.prefill_seconds > 0
    assert delta.embedding is not None
    return np.frombuffer(delta.embedding, dtype=np.float32)


def check(run: Run, wanted: dict[str, list[int]], pooling: Pooling) -> None:
    for uid, token_ids in wanted.items():
        vector = reported(run, uid)
        assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(vector, computed(run.model, token_ids, pooling), atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_embeddings_computed_in_chunks_beside_completions(name: str) -> None:
    wanted = {
        pooling: {f"{pooling}-{number}": ids for number, ids in enumerate(texts(4, seed=seed))}
        for seed, pooling in enumerate(Pooling, 1)
    }
    completions = submissions(6, seed=2, max_prompt=20)
    mixed = [asked(uid, ids, pooling) for pooling, of_pooling in wanted.items() for uid, ids in of_pooling.items()]
    mixed += completions
    random.Random(3).shuffle(mixed)
    run = Run(name, max_batched_tokens=17)
    run.drive(mixed, every=1)
    for pooling, of_pooling in wanted.items():
        check(run, of_pooling, pooling)
        assert max(map(len, of_pooling.values())) > 2 * 17, "of several chunks"
    run.check(completions)
    assert sum(stats.batch_size > 1 for stats in run.stats) > 5
    assert all(delta.embedding is None for each in completions for delta in run.deltas[each.uid])


@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings_preempted_between_chunks(pooling: Pooling) -> None:
    token_ids = list(range(30))
    crowd = [make_submit(str(i), [i + 1] * 3, max_tokens=24, ignore_eos=True, seed=i) for i in range(2)]
    run = Run("gpt2", num_blocks=14, max_batched_tokens=4, max_num_running=4)
    run.drive([*crowd, asked("text", token_ids, pooling)], every=2)
    check(run, {"text": token_ids}, pooling)
    finish = run.deltas["text"][0].finish
    assert finish is not None
    assert finish.num_preemptions > 0


def test_mean_pooling_computes_every_token_and_last_pooling_shares_prefixes() -> None:
    token_ids = list(range(40))
    for pooling, shared in ((Pooling.MEAN, 0), (Pooling.LAST, 36)):
        run = Run("rotary-gqa")
        run.drive([make_submit("before", token_ids, max_tokens=1)])
        run.drive([asked("text", token_ids, pooling)])
        check(run, {"text": token_ids}, pooling)
        finish = run.deltas["text"][0].finish
        assert finish is not None
        assert finish.num_cached_tokens == shared
        run.drive([make_submit("after", [*token_ids, 7], max_tokens=1)])
        assert run.deltas["after"][-1].finish.num_cached_tokens == 40, "blocks of an embedding are in the prefix cache"  # type: ignore[union-attr]


@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings_are_batch_invariant(pooling: Pooling) -> None:
    wanted = {str(number): ids for number, ids in enumerate(texts(12, seed=4))}
    crowd = Run("rotary-gqa")
    crowd.drive([asked(uid, ids, pooling) for uid, ids in wanted.items()])
    for uid, token_ids in wanted.items():
        alone = Run("rotary-gqa")
        alone.drive([asked(uid, token_ids, pooling)])
        np.testing.assert_allclose(reported(alone, uid), reported(crowd, uid), atol=1e-5)


def test_mean_and_last_pooling_give_different_embeddings() -> None:
    (ids,) = texts(1, seed=5)
    model = Run("gpt2").model
    apart = computed(model, ids, Pooling.MEAN) - computed(model, ids, Pooling.LAST)
    assert float(np.abs(apart).max()) > 0.01


def test_a_failed_step_resets_the_sum_of_hidden_states() -> None:
    """A retry with the same uid after a failed step adds no hidden states of the first attempt."""
    run = Run("gpt2", max_batched_tokens=16)
    token_ids = list(range(40))
    run.engine.submit(asked("text", token_ids, Pooling.MEAN))
    run.engine.step()
    (ended,) = run.engine.abort_all("aborted")
    assert ended.embedding is None
    run.drive([msgspec.structs.replace(asked("text", token_ids, Pooling.MEAN), attempt=1)])
    check(run, {"text": token_ids}, Pooling.MEAN)
