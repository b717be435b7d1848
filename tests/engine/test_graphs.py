"""CUDA graph capture and replay of decode steps, on a CPU: shapes, padding, and unchanged tokens."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.paged import PagedAttention, gathered, one_by_one
from model.nn.reference_generate import generate
from service.engine.engine import Engine
from service.engine.execution.cuda_graphs import Bucket, DecodeGraphs, buckets, smallest
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner
from service.engine.scheduling.scheduler import EngineConfig
from service.ipc.messages import Submit
from tests.engine.fakes import call_again, make_submit
from tests.engine.test_parity import EOS, TOKENIZER, submissions
from tests.model.configs import VARIANTS, attention_layers, build


def test_buckets_are_powers_of_two_with_the_largest_first() -> None:
    assert buckets(3, 8) == (Bucket(4, 8),)
    assert buckets(9, 100) == (Bucket(16, 100), Bucket(8, 100), Bucket(4, 100))
    assert {b.rows for b in buckets(64, 8)} == {4, 8, 16, 32, 64}
    assert {b.rows for b in buckets(4096, 8)} == {4, 8, 16, 32, 64, 128, 256, 512}
    assert [b.width for b in buckets(1, 128)] == [128, 32]
    assert [b.width for b in buckets(1, 8192)] == [8192, 2048, 512]
    assert list(buckets(64, 8192)) == sorted(buckets(64, 8192), reverse=True)


def test_a_step_takes_the_bucket_with_the_fewest_rows_then_the_narrowest_table() -> None:
    shapes = buckets(16, 512)
    assert smallest(shapes, 1, 1) == Bucket(4, 32)
    assert smallest(shapes, 4, 33) == Bucket(4, 128)
    assert smallest(shapes, 5, 128) == Bucket(8, 128)
    assert smallest(shapes, 16, 512) == Bucket(16, 512)
    assert smallest(shapes, 17, 1) is None
    assert smallest(shapes, 1, 513) is None


def replayed(graphs: DecodeGraphs, inputs: ModelInputs) -> Tensor | None:
    """Return the hidden states of a step by a replay; None if no captured shape holds the step."""
    if (bucket := graphs.bucket(inputs.metadata)) is None:
        return None
    graphs.fill(bucket, inputs, [])
    return graphs.replay(bucket, len(inputs.token_ids_T))


def step(ids: list[int], positions: list[int], slots: list[int], tables: list[list[int]]) -> ModelInputs:
    return ModelInputs(
        token_ids_T=torch.tensor(ids),
        metadata=AttentionMetadata(
            query_lengths=(1,) * len(ids),
            context_lengths=tuple(position + 1 for position in positions),
            positions_T=torch.tensor(positions),
            logit_rows_R=torch.arange(len(ids)),
            slot_mapping_T=torch.tensor(slots),
            block_tables_BN=torch.tensor(tables),
        ),
        params=(),
        all_greedy=True,
        wants_logprobs=False,
        positions=(),
        forbidden=(),
        rules=(),
        prompt_rows=(),
    )


def make_cache(num_blocks: int) -> KVCache:
    config = VARIANTS["rotary-gqa"]
    return KVCache(config, num_blocks=num_blocks, block_size=4, dtype=torch.float32, device="cpu")


def test_a_replayed_step_is_padded_with_the_scratch_block() -> None:
    seen: list[tuple[list[int], list[int], list[int], list[list[int]]]] = []

    def hidden(ids_T: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
        slots_T, tables_TN = metadata.slot_mapping_T, metadata.block_tables_BN
        assert slots_T is not None
        assert tables_TN is not None
        seen.append((ids_T.tolist(), metadata.positions_T.tolist(), slots_T.tolist(), tables_TN.tolist()))
        return ids_T[:, None].float()

    for width in (5, 3):  # values left by the wider step must not affect the narrower step
        shapes = (Bucket(4, 5), Bucket(4, 3))
        graphs = DecodeGraphs(hidden, make_cache(11), capture=call_again, shapes=shapes)
        replayed(graphs, step([9] * 4, [1] * 4, [1] * 4, [[1] * 5] * 4))
        table = [2] * (width - 1)
        assert replayed(graphs, step([7, 8], [5, 2], [21, 33], [[*table, 5], [*table, 9]])) is not None
        padding = [10] * width
        tables = [[*table, 5], [*table, 9], padding, padding]
        assert seen[-1] == ([7, 8, 0, 0], [5, 2, 0, 0], [21, 33, 40, 40], tables)
    assert replayed(graphs, step([7], [5], [21], [[2, 5]])) is not None
    assert seen[-1][3] == [[2, 5, 10], *[[10] * 3] * 3]


class CountingCapture:
    """A `Capture` that records captured shapes and replays, and asserts that a replay's result keeps its address."""

    def __init__(self) -> None:
        self.captured: list[torch.Size] = []
        self.replays: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay, number = call_again(compute), len(self.captured)
        result = replay()
        self.captured.append(result.shape)

        def counted() -> Tensor:
            self.replays.append(number)
            found = replay()
            assert found.data_ptr() == result.data_ptr()
            return found

        return counted


def test_cuda_graphs_are_captured_once_and_replayed_for_fitting_steps() -> None:
    seen: list[tuple[int, ...]] = []

    def hidden(ids_T: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
        assert metadata.block_tables_BN is not None
        assert metadata.is_decode
        seen.append((ids_T.data_ptr(), metadata.block_tables_BN.data_ptr(), *metadata.block_tables_BN.shape))
        return torch.stack((ids_T, metadata.positions_T), dim=1).float()

    capture = CountingCapture()
    graphs = DecodeGraphs(hidden, make_cache(10), capture=capture, shapes=buckets(8, 128))
    assert [shape[0] for shape in capture.captured] == [8, 8, 4, 4]
    assert graphs.shapes == (Bucket(8, 128), Bucket(8, 32), Bucket(4, 128), Bucket(4, 32))
    places = set(seen)
    found = replayed(graphs, step([5], [3], [15], [[3]]))
    assert found is not None
    assert found.tolist() == [[5.0, 3.0]]
    assert replayed(graphs, step([5] * 5, [200] * 5, [1] * 5, [[3] * 51] * 5)) is not None
    assert capture.replays == [3, 0]
    assert set(seen) == places
    assert replayed(graphs, step([5] * 9, [3] * 9, [1] * 9, [[3]] * 9)) is None
    prompt = AttentionMetadata(
        query_lengths=(2,), context_lengths=(2,), positions_T=torch.arange(2),
        slot_mapping_T=torch.arange(2), block_tables_BN=torch.tensor([[0]]),
    )  # fmt: skip
    inputs = step([1, 2], [0, 1], [0, 1], [[0], [0]])
    assert replayed(graphs, msgspec.structs.replace(inputs, metadata=prompt)) is None


def engine(variant: str, capture: CountingCapture | None, **config: Any) -> Engine:
    model = build(VARIANTS[variant])
    for attention in attention_layers(model):
        attention.backend = PagedAttention(gathered, one_by_one)
    values = {"block_size": 4, "num_blocks": 200, "max_num_running": 16, "max_batched_tokens": 64, **config}
    runner = ModelRunner(
        model, num_blocks=values["num_blocks"], block_size=values["block_size"], vocab_size=TOKENIZER.vocab_size
    )
    if capture is not None:
        runner.capture_decodes(capture, max_rows=8, max_context_length=64)
    return Engine(model, TOKENIZER, EngineConfig(**values), runner=runner)


def answers(engine: Engine, submits: list[Submit], every: int) -> dict[str, list[Any]]:
    waiting, number = list(submits), 0
    reported: dict[str, list[Any]] = {}
    while waiting or engine.has_work:
        if waiting and number % every == 0:
            engine.submit(waiting.pop(0))
        for delta in engine.step().events:
            reported.setdefault(delta.uid, []).append(delta)
        number += 1
    engine.check_integrity()
    return reported


@pytest.mark.parametrize("variant", ["rotary-gqa", "gpt2", "window-one-layer", "alibi"])
def test_tokens_with_cuda_graphs_equal_the_reference(variant: str) -> None:
    """Steps of up to 8 rows are replayed; larger steps and prompts are not. The small pool causes preemptions.

    Layers with a bias use a backend that needs context lengths, so their steps cannot be captured.
    """
    capture = CountingCapture()
    submits = submissions(18, seed=3, max_prompt=24)
    built = engine(variant, None if variant == "alibi" else capture, num_blocks=40)
    reported = answers(built, submits, every=2)
    for submit in submits:
        found = [token_id for delta in reported[submit.uid] for token_id in delta.token_ids]
        expected = generate(build(VARIANTS[variant]), submit.prompt_token_ids, submit.params, eos_token_ids=(EOS,))
        assert found == expected
    # 16 blocks of 4 hold a context of 64: one width, and graphs for 8 and 4 rows.
    assert set(capture.replays) == (set() if variant == "alibi" else {0, 1})


def test_replay_of_cuda_graphs_does_not_change_logprobs() -> None:
    """Compare tokens, text, logprobs and prompt logprobs, with penalties and drafts, with and without CUDA graphs."""
    rng = random.Random(2)
    texts = [[rng.randrange(EOS) for _ in range(rng.randint(1, 12))] for _ in range(5)]
    repeating = [1, 2, 3, 4] * 4
    submits = [
        make_submit("plain", texts[0], max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=3),
        make_submit("scored", texts[1], max_tokens=9, seed=4, prompt_logprobs=2, logprobs=0, ignore_eos=True),
        make_submit("penalised", texts[2], max_tokens=30, temperature=0.0, frequency_penalty=1.5, ignore_eos=True),
        make_submit("drafted", repeating, max_tokens=30, temperature=0.0, ignore_eos=True),
    ]
    capture = CountingCapture()
    with_graphs = answers(engine("rotary-gqa", capture, max_draft_tokens=3), submits, every=1)
    without = answers(engine("rotary-gqa", None, max_draft_tokens=3), submits, every=1)
    assert len(capture.replays) > 20
    for uid, deltas in without.items():  # the length of a draft depends on step times
        found = with_graphs[uid]
        assert joined(found, "token_ids") == joined(deltas, "token_ids")
        assert "".join(delta.text for delta in found) == "".join(delta.text for delta in deltas)
        for name in ("logprobs", "prompt_logprobs"):
            for ours, theirs in zip(joined(found, name), joined(deltas, name), strict=True):
                assert ours.token_id == theirs.token_id
                assert ours.logprob == (theirs.logprob and pytest.approx(theirs.logprob, abs=1e-5))


def joined(deltas: list[Any], name: str) -> list[Any]:
    return [item for delta in deltas for item in getattr(delta, name) or ()]
