"""Log-likelihoods: equal to a naive loop, independent of the batch, with the windows of lm-evaluation-harness."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.evaluation import likelihood
from model.evaluation.likelihood import (
    Window,
    begin_of_text,
    end_of_text,
    evaluate,
    rolling_log_likelihoods,
    rolling_windows,
    score_windows,
)
from model.nn.transformer import Transformer
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.interface import TokenizerError
from tests.model.configs import ROTARY, build
from tests.tiny_model import tiny_tokenizer

CONTEXT = 64
IDS = st.lists(st.integers(0, ROTARY["vocab_size"] - 1), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build(ModelConfig.from_dict(ROTARY))


def naive(model: Transformer, given_ids: Sequence[int], scored: Sequence[int]) -> tuple[float, int]:
    """Score each token in a separate forward pass; return the total logprob and the number of top-1 tokens."""
    ids, total, greedy = list(given_ids), 0.0, 0
    for token_id in scored:
        with torch.inference_mode():
            logits_V = model(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)[-1].double()
        total += float(logits_V.log_softmax(-1)[token_id])
        greedy += int(logits_V.argmax()) == token_id
        ids.append(token_id)
    return total, greedy


@settings(max_examples=30, deadline=None)
@given(pairs=st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5), max_tokens=st.integers(1, 200))
def test_batches_have_the_scores_of_a_naive_loop(pairs: list[tuple[list[int], list[int]]], max_tokens: int) -> None:
    model = build(ModelConfig.from_dict(ROTARY))
    windows = [Window(given_ids, scored) for given_ids, scored in pairs]
    batched = [score for batch in likelihood._batches(windows, max_tokens) for score in score_windows(model, batch)]
    for window, score in zip(windows, batched, strict=True):
        total, greedy = naive(model, window.given, window.scored)
        assert score.log_likelihood == pytest.approx(total, abs=1e-4)
        assert (score.num_tokens, score.num_greedy) == (len(window.scored), greedy)


def test_a_score_does_not_depend_on_the_other_windows_of_its_batch(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [Window([1, 2, 3][: 1 + i % 3], list(range(5 + i, 10 + 3 * i))) for i in range(12)]
    together = score_windows(model, windows)
    monkeypatch.setattr(likelihood, "_MAX_TOKENS", 1)
    alone = score_windows(model, windows)
    monkeypatch.setattr(likelihood, "_ROWS_PER_SOFTMAX", 3)
    assert score_windows(model, windows) == alone
    for one, other in zip(together, alone, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
        assert (one.num_tokens, one.num_greedy) == (other.num_tokens, other.num_greedy)


@given(lengths=st.lists(st.integers(1, 9), max_size=20), max_tokens=st.integers(1, 12))
def test_batches_keep_order_and_limit(lengths: list[int], max_tokens: int) -> None:
    windows = [Window([0], [1] * length) for length in lengths]
    batches = list(likelihood._batches(windows, max_tokens))
    assert [window for batch in batches for window in batch] == windows
    for batch in batches:
        assert len(batch) == 1 or sum(window.num_inputs for window in batch) <= max_tokens


@given(ids=st.lists(st.integers(0, 999), max_size=60), max_inputs=st.integers(1, 20))
def test_rolling_windows_equal_those_of_the_harness(ids: list[int], max_inputs: int) -> None:
    theirs = map(
        make_disjoint_window,
        get_rolling_token_windows(token_list=ids, prefix_token=-1, max_seq_len=max_inputs, context_len=1),
    )
    ours = rolling_windows(ids, -1, max_inputs)
    assert [(list(window.given), list(window.scored)) for window in ours] == [(a, b) for a, b in theirs]
    assert [token_id for window in ours for token_id in window.scored] == ids
    assert all(window.num_inputs <= max_inputs for window in ours)


def test_a_window_longer_than_the_context_is_rejected(model: Transformer) -> None:
    assert score_windows(model, []) == []
    with pytest.raises(ValueError, match="a text window of 65 tokens exceeds the model's context of 64"):
        score_windows(model, [Window([0], [1] * (CONTEXT + 1))])


def tokenizer_with(*, bos: int | None, eos: tuple[int, ...]) -> ByteLevelTokenizer:
    ranks = {bytes([byte]): byte for byte in range(256)}
    marks = {"<begin>": 256, "<end>": 257, "<turn>": 258}
    return ByteLevelTokenizer(
        pattern=r"\s+|\S+", ranks=ranks, special_tokens=marks, bos_token_id=bos, eos_token_ids=eos
    )


@pytest.mark.parametrize(
    ("bos", "eos", "begin", "end"),
    [(256, (257,), 256, 257), (None, (257, 258), 257, 257), (257, (258, 257), 257, 257), (256, (), 256, None)],
)
def test_special_tokens_at_the_begin_and_end_of_a_text(
    bos: int | None, eos: tuple[int, ...], begin: int, end: int | None
) -> None:
    tokenizer = tokenizer_with(bos=bos, eos=eos)
    assert (begin_of_text(tokenizer), end_of_text(tokenizer)) == (begin, end)


def test_a_tokenizer_without_bos_and_eos_token_is_rejected() -> None:
    tokenizer = tokenizer_with(bos=None, eos=())
    assert end_of_text(tokenizer) is None
    with pytest.raises(TokenizerError, match="no BOS and no EOS token"):
        begin_of_text(tokenizer)


def test_held_out_metrics_equal_a_hand_calculation(model: Transformer) -> None:
    """Bits, nats and accuracy of texts below and beyond the context, including the end-of-text token."""
    tokenizer = tiny_tokenizer()
    end = begin_of_text(tokenizer)
    texts = ["once upon", "the " * 90, "é"]
    nats, tokens, greedy, documents = 0.0, 0, 0, []
    for text in texts:
        windows = rolling_windows([*tokenizer.encode(text), end], end, CONTEXT)
        assert (len(windows) > 1) == (text == texts[1])
        found = [naive(model, window.given, window.scored) for window in windows]
        documents.append(sum(total for total, _ in found))
        nats -= documents[-1]
        greedy += sum(count for _, count in found)
        tokens += len(tokenizer.encode(text)) + 1
    measured = evaluate(model, tokenizer, texts)
    assert [score.log_likelihood for score in measured.documents] == pytest.approx(documents, abs=1e-3)
    assert measured.nats_per_token == pytest.approx(nats / tokens, abs=1e-5)
    assert measured.bits_per_byte == pytest.approx(nats / math.log(2) / (9 + 360 + 2), abs=1e-5)
    assert measured.accuracy == greedy / tokens
    with pytest.raises(ValueError, match="no texts to evaluate"):
        evaluate(model, tokenizer, [])


def test_a_shorter_context_changes_the_likelihood(model: Transformer) -> None:
    tokenizer = tiny_tokenizer()
    texts = ["once upon a time there was an inn"]
    end = begin_of_text(tokenizer)
    windows = rolling_windows([*tokenizer.encode(texts[0]), end], end, 5)
    expected = sum(score.log_likelihood for score in score_windows(model, windows))
    measured = evaluate(model, tokenizer, texts, max_context_length=5)
    assert measured.total.log_likelihood == pytest.approx(expected)
    assert measured.total.log_likelihood != pytest.approx(evaluate(model, tokenizer, texts).total.log_likelihood)


def test_harness_likelihoods_omit_the_eos_token_and_reserve_two_tokens(model: Transformer) -> None:
    tokenizer = tiny_tokenizer()
    texts = ["once upon a time", "the " * 90, ""]
    begin = begin_of_text(tokenizer)
    expected = [
        sum(s.log_likelihood for s in score_windows(model, rolling_windows(tokenizer.encode(text), begin, CONTEXT - 2)))
        for text in texts
    ]
    assert rolling_log_likelihoods(model, tokenizer, texts, max_length=CONTEXT) == pytest.approx(expected)
    assert expected[2] == 0
    short = evaluate(model, tokenizer, texts[:1]).documents[0].log_likelihood
    assert short < expected[0], "the mark that ends a text costs something"


def test_bfloat16_scores_are_close_to_float32_scores(tiny_checkpoint: object) -> None:
    manifest = read_manifest(str(tiny_checkpoint))
    tokenizer = manifest.verify()
    exact, rounded = (
        load_model(manifest, device="cpu", dtype=dtype, attention=ATTENTION_BACKENDS["sdpa"])
        for dtype in (torch.float32, torch.bfloat16)
    )
    texts = ["once upon a time there was the inn"]
    nats = [evaluate(model, tokenizer, texts).nats_per_token for model in (exact, rounded)]
    assert nats[0] != nats[1]
    assert nats[0] == pytest.approx(nats[1], rel=0.05)
