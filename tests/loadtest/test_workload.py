"""Workloads: determinism, lengths, prefixes and clients."""

import argparse
import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.client.outcome import ClientKind
from loadtest.client.requests import (
    ConversationRequest,
    EmbeddingLoadRequest,
    LoadRequest,
    StructuredRequest,
    ToolRequest,
)
from loadtest.client.workload import (
    NUM_PREFIXES,
    Passages,
    Workload,
    WorkloadKind,
    WorkloadSpec,
    add_workload_arguments,
    spec_from_arguments,
    tales,
)
from tests.tiny_model import tiny_tokenizer

TALES = tales()
TOKEN_STRS = [TALES[start : start + 4] for start in range(0, len(TALES), 4)]
PASSAGES = Passages(TALES, TOKEN_STRS, overshoot=2.5)
SPECS = st.builds(
    WorkloadSpec,
    kind=st.sampled_from(["fixed", "lognormal", "shared-prefix", "mixed", "chat"]),
    prompt_tokens=st.integers(1, 400),
    output_tokens=st.integers(1, 400),
    sigma=st.floats(0, 1),
    whole_share=st.floats(0, 0.5),
    cancelling_share=st.floats(0, 0.5),
    max_context_tokens=st.integers(8, 600),
    seed=st.integers(0, 1 << 40),
)


def requests(spec: WorkloadSpec, count: int = 400) -> list[LoadRequest]:
    workload = Workload(spec, PASSAGES)
    return [workload.request(index) for index in range(count)]


@settings(deadline=None)
@given(spec=SPECS, index=st.integers(0, 1 << 30))
def test_a_request_is_a_function_of_spec_and_index(spec: WorkloadSpec, index: int) -> None:
    first, second = Workload(spec, PASSAGES), Workload(spec, Passages(TALES, TOKEN_STRS, overshoot=2.5))
    second.request(index + 1)  # an earlier call must not change the result
    assert first.request(index) == second.request(index)


@settings(deadline=None)
@given(spec=SPECS, index=st.integers(0, 10_000))
def test_every_request_fits_the_context(spec: WorkloadSpec, index: int) -> None:
    request = Workload(spec, PASSAGES).request(index)
    assert request.prompt
    assert 1 <= request.max_tokens <= spec.max_context_tokens // 2
    # Each part of a prompt has at least one word, and the longest word of the text has 20 characters.
    text = request.prompt[0] if isinstance(request, ConversationRequest) else request.prompt
    assert len(str(text)) <= max(4.0 * (spec.max_context_tokens - request.max_tokens), 2 * 20 + 1)
    assert (request.cancel_after is not None) == (request.client is ClientKind.CANCELLING)
    assert request.cancel_after is None or 1 <= request.cancel_after <= request.max_tokens


def test_requests_differ_by_seed_and_index() -> None:
    spec = WorkloadSpec(kind=WorkloadKind.LOGNORMAL)
    prompts = {request.prompt for seed in range(3) for request in requests(replace(spec, seed=seed), 300)}
    assert len(prompts) == 900
    assert len({request.seed for request in requests(spec)}) > 390


def test_passages_begin_differently_until_the_text_is_used_up() -> None:
    # A prefix cache shares at least a block of 16 tokens. The tales repeat some phrases.
    beginnings = {PASSAGES.cut(start, 16) for start in range(5000)}
    assert len(beginnings) >= 4990


def test_fixed_prompts_and_completions_have_one_length() -> None:
    spec = WorkloadSpec(prompt_tokens=100, output_tokens=32)
    assert {request.max_tokens for request in requests(spec)} == {32}
    assert all(370 < len(request.prompt) <= 400 for request in requests(spec))


def test_lognormal_lengths_have_the_requested_median_and_sigma() -> None:
    spec = WorkloadSpec(
        kind=WorkloadKind.LOGNORMAL, prompt_tokens=100, output_tokens=50, sigma=0.5, max_context_tokens=100_000
    )
    lengths = [math.log(request.max_tokens) for request in requests(spec, 2000)]
    # 2,000 samples: mean within 5 standard errors (0.5 / sqrt(2000) = 0.011), false alarm below 1e-6 by design,
    # and none in fact, because the seed is fixed.
    assert statistics.mean(lengths) == pytest.approx(math.log(50), abs=0.056)
    assert statistics.stdev(lengths) == pytest.approx(0.5, rel=0.08)


def test_prompts_share_prefixes_and_nothing_else() -> None:
    spec = WorkloadSpec(kind=WorkloadKind.SHARED_PREFIX, prompt_tokens=100)
    parts = [str(request.prompt).split("\n") for request in requests(spec)]
    assert len({prefix for prefix, _ in parts}) == NUM_PREFIXES
    assert len({own for _, own in parts}) == 400
    assert all(270 < len(prefix) <= 300 for prefix, _ in parts)


def test_mixed_has_short_and_long_prompts_and_completions() -> None:
    seen = requests(WorkloadSpec(kind=WorkloadKind.MIXED, prompt_tokens=64, output_tokens=64))
    assert {16, 128} <= {request.max_tokens for request in seen}
    lengths = [len(request.prompt) for request in seen]
    assert max(lengths) > 8 * min(lengths)


@pytest.mark.parametrize(("whole", "cancelling"), [(0.0, 0.0), (0.25, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_clients_have_the_requested_shares(whole: float, cancelling: float) -> None:
    slow = (1.0 - whole - cancelling) / 2
    spec = WorkloadSpec(whole_share=whole, cancelling_share=cancelling, slow_share=slow, slow_bytes_per_second=9.0)
    sent = requests(spec, 1000)
    clients = [request.client for request in sent]
    assert clients.count(ClientKind.SLOW) / 1000 == pytest.approx(slow, abs=0.08)
    assert all((request.bytes_per_second == 9.0) == (request.client is ClientKind.SLOW) for request in sent)
    # 1,000 samples of a fixed seed; 5 standard errors of a share are at most 0.08.
    assert clients.count(ClientKind.WHOLE) / 1000 == pytest.approx(whole, abs=0.08)
    assert clients.count(ClientKind.CANCELLING) / 1000 == pytest.approx(cancelling, abs=0.08)
    if whole + cancelling == 1.0:
        assert ClientKind.STREAMING not in clients


def test_the_body_has_the_fields_of_the_request() -> None:
    request = LoadRequest(index=3, prompt="Once", max_tokens=9, temperature=0.0, ignore_eos=False, seed=5)
    assert request.body("m") == {
        "model": "m",
        "prompt": "Once",
        "max_tokens": 9,
        "temperature": 0.0,
        "ignore_eos": False,
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert "stream" not in replace(request, client=ClientKind.WHOLE).body("m")


@pytest.mark.parametrize(("text", "token_strs"), [("too short", ["too short"]), (TALES, TOKEN_STRS[:-1])])
def test_short_texts_and_tokens_that_do_not_spell_the_text_are_rejected(text: str, token_strs: list[str]) -> None:
    with pytest.raises(ValueError, match=f"and the text {len(text)} in {len(text.split())} words"):
        Passages(text, token_strs)


def test_a_tokenized_text_gives_prompts_of_the_requested_length() -> None:
    tokenizer = tiny_tokenizer()
    pieces = [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(TALES)]
    passages = Passages(TALES, pieces)
    for start in range(300):
        count = len(tokenizer.encode(passages.cut(start, 60)))
        assert 60 - 20 <= count <= 60 + 1  # a word is left out whole, and the first has no space before it


def test_every_option_sets_a_field_of_the_spec() -> None:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    given = "--workload mixed --prompt-tokens 3 --output-tokens 4 --sigma 0.1 --whole-share 0.2 "
    given += "--cancelling-share 0.3 --temperature 0.5 --stop-at-end --seed 6"
    expected = WorkloadSpec(
        kind=WorkloadKind.MIXED,
        prompt_tokens=3,
        output_tokens=4,
        sigma=0.1,
        whole_share=0.2,
        cancelling_share=0.3,
        temperature=0.5,
        ignore_eos=False,
        seed=6,
    )
    assert spec_from_arguments(parser.parse_args(given.split())) == expected
    assert spec_from_arguments(parser.parse_args([])) == WorkloadSpec()


def test_shares_of_kinds_are_kept_and_every_kind_fits_the_context() -> None:
    spec = WorkloadSpec(kind="chat=3,multi-turn=2,structured,tools,embeddings", turns=3, max_context_tokens=1024)
    seen = requests(spec, 800)
    counts = Counter(type(request) for request in seen)
    # 800 samples of a fixed seed; 5 standard errors of a share are at most 0.09.
    assert counts[ConversationRequest] / 800 == pytest.approx(5 / 8, abs=0.09)
    assert all(counts[kind] / 800 == pytest.approx(1 / 8, abs=0.06) for kind in (StructuredRequest, ToolRequest))
    talks = [each for each in seen if isinstance(each, ConversationRequest) and each.later]
    assert {len(talk.later) for talk in talks} == {1, 2}
    for talk in talks:
        texts = [*talk.prompt, *(turn.text for turn in talk.later)]
        answers = talk.max_tokens + sum(turn.max_tokens for turn in talk.later)
        assert 2.5 * sum(map(len, map(str, texts))) / 4 + answers < 1024 + 2.5 * 20
    assert all(each.client is ClientKind.WHOLE for each in seen if isinstance(each, EmbeddingLoadRequest))


@pytest.mark.parametrize("kind", ["", "songs", "chat=much", "chat=0", "chat=1,,tools"])
def test_invalid_shares_are_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match="--workload"):
        Workload(WorkloadSpec(kind=kind), PASSAGES)
