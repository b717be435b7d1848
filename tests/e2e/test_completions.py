"""Completions over HTTP from a real service, equal to those of the reference implementation."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from model.attention.metadata import AttentionMetadata
from service.preprocess.request_processor import sample_seed
from tests.e2e.process import NO_TLS, Service, serving
from tests.e2e.slow_twin import Oracle
from tests.service import streams

pytestmark = pytest.mark.slow

PROMPT = "once upon a time"


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


def streamed(service: Service, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream, and check that its last event is [DONE]."""
    response = service.post(**fields, stream=True)
    assert response.status_code == 200, response.text
    return streams.events(response.text)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}],
)
def test_a_completion_equals_the_reference_streamed_or_not(
    service: Service, oracle: Oracle, params: dict[str, Any]
) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 40, **params}
    expected = oracle.text(PROMPT, max_tokens=40, **params)
    assert service.text(**fields) == expected
    chunks = streamed(service, **fields)
    assert joined(chunks) == expected
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) <= {None}


def test_the_openai_client_completes_and_streams(client: openai.OpenAI, oracle: Oracle) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    expected = oracle.text(PROMPT, max_tokens=20, temperature=0)
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    assert whole.choices[0].text == expected
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(oracle.ids(PROMPT, max_tokens=20, temperature=0))
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_lists_of_prompts_and_n_give_choices_in_order(service: Service, oracle: Oracle) -> None:
    body = service.complete(["once", "in"], n=2, seed=5, max_tokens=12)
    expected = [
        oracle.text(prompt, max_tokens=12, seed=sample_seed(5, sample))
        for prompt in ("once", "in")
        for sample in (0, 1)
    ]
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(expected))
    assert len(set(expected)) == 4
    chunks = streamed(service, prompt=["once", "in"], n=2, seed=5, max_tokens=12)
    assert [joined(chunks, index) for index in range(4)] == expected
    ids = [oracle.tokenizer.encode(prompt) for prompt in ("once", "in")]
    assert [c["text"] for c in service.complete(ids, n=2, seed=5, max_tokens=12)["choices"]] == expected
    usage = body["usage"]
    assert usage["prompt_tokens"] == sum(map(len, ids))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_same_seed_gives_the_same_text_and_no_seed_gives_other_texts(service: Service) -> None:
    assert service.text(PROMPT, seed=9) == service.text(PROMPT, seed=9)
    assert len({service.text(PROMPT, max_tokens=30) for _ in range(4)}) > 1


def test_echo_gives_the_prompt_before_the_completion(service: Service) -> None:
    plain = service.text(PROMPT, temperature=0)
    assert service.text(PROMPT, temperature=0, echo=True) == PROMPT + plain
    assert joined(streamed(service, prompt=PROMPT, temperature=0, echo=True)) == PROMPT + plain


@pytest.mark.parametrize("top", [0, 3, 20])
def test_logprobs_equal_those_of_the_model(service: Service, oracle: Oracle, top: int) -> None:
    body = service.complete(PROMPT, temperature=0, max_tokens=8, logprobs=top, echo=True, ignore_eos=True)
    logprobs, text = body["choices"][0]["logprobs"], body["choices"][0]["text"]
    prompt_ids = oracle.tokenizer.encode(PROMPT)
    ids = prompt_ids + oracle.ids(PROMPT, temperature=0, max_tokens=8, ignore_eos=True)
    from_model = torch.log_softmax(_logits(oracle, ids), dim=-1)
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        own = logprobs["token_logprobs"][position]
        assert own == pytest.approx(float(from_model[position - 1, ids[position]]), abs=1e-4)
        alternatives = logprobs["top_logprobs"][position]
        assert max(1, top) <= len(alternatives) <= top + 1
        assert alternatives[logprobs["tokens"][position]] == own
        assert list(alternatives.values())[:top] == sorted(alternatives.values(), reverse=True)[:top]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert text[offset : offset + len(token)] == token
    chunks = streamed(service, prompt=PROMPT, temperature=0, max_tokens=8, logprobs=top, echo=True, ignore_eos=True)
    pieces = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    in_stream = {key: [value for piece in pieces for value in piece[key]] for key in logprobs}
    assert in_stream["tokens"] == logprobs["tokens"]
    assert in_stream["text_offset"] == logprobs["text_offset"]
    assert in_stream["token_logprobs"][1:] == pytest.approx(logprobs["token_logprobs"][1:], abs=1e-5)
    assert list(map(bool, in_stream["top_logprobs"])) == list(map(bool, logprobs["top_logprobs"]))


def _logits(oracle: Oracle, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle.model(torch.tensor(ids), AttentionMetadata.uncached((len(ids),)), None)
    return logits


def test_optional_response_fields_are_the_same_streamed_or_not(service: Service, oracle: Oracle) -> None:
    asked = {"logprobs": 2, "prompt_logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    drawn: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    fields: dict[str, Any] = {"prompt": ["once", "in a hat"], "n": 2, "seed": 5, "echo": True, **drawn, **asked}
    body = service.post(**fields).json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(service, **fields, stream_options=options)
    streams.assert_close(streams.joined(chunks), {"choices": body["choices"]})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == sorted(
        chunk["usage"]["completion_tokens"] for chunk in chunks
    )
    assert chunks[-1]["usage"]["total_tokens"] == body["usage"]["total_tokens"]
    for number, choice in enumerate(body["choices"]):
        prompt = fields["prompt"][number // 2]
        prompt_ids = oracle.tokenizer.encode(prompt)
        ids = oracle.ids(prompt, seed=sample_seed(5, number % 2), **drawn)
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt_ids, ids)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in [*prompt_ids, *ids]]
        check_prompt_logprobs(choice["prompt_logprobs"], prompt_ids, _logits(oracle, prompt_ids))


def check_prompt_logprobs(told: list[Any], ids: list[int], logits: torch.Tensor) -> None:
    """Check prompt logprobs against the model: for each position the prompt's token and the three likeliest tokens."""
    assert (len(told), told[0]) == (len(ids), None)
    for row, entries in enumerate(told[1:]):
        expected, own = logits[row].log_softmax(dim=-1), entries[str(ids[row + 1])]
        assert 3 <= len(entries) <= 4
        assert {rank for entry in entries.values() if (rank := entry["rank"]) <= 3} == {1, 2, 3}
        assert own["logprob"] == pytest.approx(float(expected[ids[row + 1]]), abs=1e-4)
        surely, perhaps = (int((expected > own["logprob"] + margin).sum()) for margin in (1e-4, -1e-4))
        assert surely < own["rank"] <= perhaps


def test_max_tokens_0_with_echo_returns_the_logprobs_of_several_prompts(service: Service, oracle: Oracle) -> None:
    fields: dict[str, Any] = {"prompt": ["once", PROMPT], "n": 2, "max_tokens": 0, "echo": True, "logprobs": 1}
    body = service.post(**fields).json()
    assert [choice["text"] for choice in body["choices"]] == ["once", "once", PROMPT, PROMPT]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    chunks = streamed(service, **fields)
    assert len(chunks) == 4
    streams.assert_close(streams.joined(chunks)["choices"], body["choices"])
    ids = oracle.tokenizer.encode(PROMPT)
    expected = _logits(oracle, ids).log_softmax(dim=-1)[range(len(ids) - 1), ids[1:]].tolist()
    assert body["choices"][2]["logprobs"]["token_logprobs"] == [None, *(pytest.approx(x, abs=1e-4) for x in expected)]


def test_a_truncated_prompt_is_completed_like_its_remaining_tokens(service: Service, oracle: Oracle) -> None:
    ids = oracle.tokenizer.encode("the cat and the hat, " * 30)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    assert service.post(prompt=ids, **fields).status_code == 400
    ends = {"left": ids[-20:], "right": ids[:20]}
    texts = {side: service.text(left, **fields) for side, left in ends.items()}
    for side, text in texts.items():
        body = service.complete(ids, truncate_prompt_tokens=20, truncation_side=side, **fields)
        assert (body["choices"][0]["text"], body["usage"]["prompt_tokens"]) == (text, 20)
    assert texts["left"] != texts["right"]
    assert service.complete(ids, truncate_prompt_tokens=-1, **fields)["usage"]["total_tokens"] <= 256


def test_stop_strings_and_stop_token_ids_end_a_completion(service: Service, oracle: Oracle) -> None:
    full = oracle.text(PROMPT, temperature=0, max_tokens=60, ignore_eos=True)
    stop = full[10:12]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    choice = service.complete(PROMPT, stop=stop, **fields)["choices"][0]
    assert choice["text"] == full[: full.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert joined(streamed(service, prompt=PROMPT, stop=[stop, "never seen"], **fields)) == choice["text"]
    assert service.text(PROMPT, stop=stop, include_stop_str_in_output=True, **fields) == choice["text"] + stop
    ids = oracle.ids(PROMPT, temperature=0, max_tokens=60, ignore_eos=True)
    ended = service.complete(PROMPT, stop_token_ids=[ids[5]], **fields)["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", ids[5])
    assert service.complete(PROMPT, max_tokens=7, temperature=0)["usage"]["completion_tokens"] <= 7
    late = service.complete(PROMPT, stop_token_ids=[ids[5]], min_tokens=20, **fields)
    assert late["usage"]["completion_tokens"] >= 20


def test_penalties_logit_bias_and_token_rules_act(service: Service, oracle: Oracle) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    word, expected = next(chr(i) for i in oracle.ids(PROMPT, temperature=0, **fields) if 33 <= i < 127), set()
    penalties = ("presence_penalty", 2.0), ("frequency_penalty", 1.5), ("repetition_penalty", 3.0)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *(({name: by}, {name: by}) for name, by in penalties),
        ({"logit_bias": {"104": 100}}, {"logit_bias": ((104, 100.0),)}),
        ({"allowed_token_ids": [97, 98, 99]}, {"allowed_token_ids": (97, 98, 99)}),
        ({"bad_words": [word]}, {"bad_word_ids": tuple(tuple(oracle.tokenizer.encode(s + word)) for s in ("", " "))}),
        ({}, {}),
    ]
    for said, meant in cases:
        expected.add(greedy := oracle.text(PROMPT, temperature=0, **fields, **meant))
        assert service.text(PROMPT, temperature=0, **fields, **said) == greedy
        drawn = joined(streamed(service, prompt=PROMPT, seed=3, **fields, **said))
        assert drawn == oracle.text(PROMPT, seed=3, **fields, **meant)
    assert len(expected) == 7, "each field changes the text"
    walled = service.post(prompt=PROMPT, stream=True, allowed_token_ids=[97], bad_words=["aa"])
    assert "no token may follow the 1 tokens of" in json.loads(walled.text.split("data: ")[-1])["error"]["message"]


def test_best_of_returns_the_choices_of_highest_mean_logprob(service: Service) -> None:
    fields = {"prompt": PROMPT, "seed": 5, "max_tokens": 12, "logprobs": 0}
    samples, best = (service.complete(**fields, **more) for more in ({"n": 5}, {"n": 2, "best_of": 5}))
    means = {c["text"]: sum(own := c["logprobs"]["token_logprobs"]) / len(own) for c in samples["choices"]}
    assert [c["text"] for c in best["choices"]] == sorted(means, key=means.__getitem__, reverse=True)[:2]
    assert best["usage"]["completion_tokens"] == samples["usage"]["completion_tokens"]


def test_a_repeated_prompt_is_found_in_the_cache(service: Service) -> None:
    prompt = "the cat and the hat " * 4
    first = service.complete(prompt, temperature=0)
    second = service.complete(prompt, temperature=0)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_timings_and_usage_come_with_the_end_of_a_stream(service: Service) -> None:
    *pieces, summary = streamed(service, prompt=PROMPT, max_tokens=9, stream_options={"include_usage": True})
    assert summary["choices"] == []
    assert summary["usage"]["prompt_tokens"] + summary["usage"]["completion_tokens"] == summary["usage"]["total_tokens"]
    timings = summary["timings"]
    assert pieces[-1]["timings"] == timings
    assert 0 <= timings["queue_ms"] <= timings["ttft_ms"]
    assert timings["prefill_ms"] > 0
    assert all("usage" not in piece for piece in pieces)


def test_unknown_routes_and_methods_get_json_errors(service: Service) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/answers", 404),
        ("POST", "/shutdown", 404),
        ("GET", "/info", 404),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
    ):
        response = httpx.request(method, service.url + path, timeout=300, verify=NO_TLS)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_client_gets_its_whole_stream(service: Service, version: str) -> None:
    """`nc -N` closes its sending side after the request."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/{version}\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=300) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if version == "1.1" else b""))


def test_no_earlier_request_caused_an_internal_error(service: Service) -> None:
    assert service.metric("llm_request_failures_total", status="500") == 0
    assert "Traceback" not in service.log.read_text()


def test_a_server_with_int4_weights_answers_alone_and_in_a_crowd_alike(tiny_checkpoint: Path, tmp_path: Path) -> None:
    requests = [{"prompt": PROMPT[: 4 + number], "seed": number, "max_tokens": 30} for number in range(8)]
    with serving(tiny_checkpoint, tmp_path, "--quantize", "int4") as service:
        assert "int4 matrices" in service.log.read_text()
        alone = [service.text(**request) for request in requests]
        with ThreadPoolExecutor(max_workers=8) as pool:
            assert list(pool.map(lambda request: service.text(**request), requests)) == alone
    assert len(set(alone)) > 1
