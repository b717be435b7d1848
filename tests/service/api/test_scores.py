"""Routes `/v1/score` and `/v1/rerank` with an engine that responds at once."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from model.io.files import CheckpointError
from model.sampling.params import MAX_LOGPROBS
from model.tokenizer.byte_level import ByteLevelTokenizer
from service.api.app import Frontend
from service.config.settings import ServeSettings, SettingsError
from service.ipc.messages import FinishReason, Submit, TokenLogprob, decode_commands, encode_events
from service.ipc.shared_state import Lifecycle, Phase
from service.preprocess.rerank_prompt import RerankPrompt, read_rerank_prompt
from service.protocol.scores import RerankRequest
from tests.service.echo import EchoChannel, vector
from tests.service.sequences import make_choice, make_delta, make_finish, make_request
from tests.tiny_model import EOS, save_tiny_checkpoint, tiny_tokenizer

TEMPLATE = EOS + "Q:{query} D:{document}" + EOS


def ask(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def similarity(one: str, other: str) -> float:
    return float(vector(list(one.encode())) @ vector(list(other.encode())))


def scores(body: dict[str, Any]) -> list[float]:
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    assert {each["object"] for each in body["data"]} == {"score"}
    return [each["score"] for each in body["data"]]


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_of_pairs_are_cosine_similarities(client: TestClient, names: tuple[str, str]) -> None:
    for queries, documents in (("q", "d"), ("q", ["d", "e", "q"]), (["q", "r", "s"], ["d", "e", "f"])):
        body = ask(client, "/v1/score", **dict(zip(names, (queries, documents), strict=True)), model="tiny")
        left = [queries] * len(documents) if isinstance(queries, str) else queries
        expected = [similarity(one, other) for one, other in zip(left, documents, strict=True)]
        assert scores(body) == pytest.approx(expected, abs=1e-6)
        count = len("".join(queries)) + len("".join(documents))
        assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
        assert (body["object"], body["model"], body["id"][:6]) == ("list", "tiny", "score-")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_ranked_best_first(client: TestClient, path: str) -> None:
    documents = ["d", "e", "q", "f", "q"]
    body = ask(client, path, query="q", documents=documents)
    expected = sorted(range(5), key=lambda index: -similarity("q", documents[index]))
    assert [each["index"] for each in body["results"]] == expected
    assert expected[:2] == [2, 4], "equal scores keep the order of the request"
    for each in body["results"]:
        assert each["relevance_score"] == pytest.approx(similarity("q", documents[each["index"]]), abs=1e-6)
        assert each["document"] == {"text": documents[each["index"]]}
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    short = ask(client, path, query="q", documents=[{"text": each} for each in documents], top_n=2)
    assert short["results"] == body["results"][:2]
    bare = ask(client, path, query="q", documents=documents, top_n=9, return_documents=False)
    assert [set(each) for each in bare["results"]] == [{"index", "relevance_score"}] * 5


def test_truncate_prompt_tokens_cuts_embedded_texts(client: TestClient, queue: EchoChannel) -> None:
    ask(client, "/rerank", query="abcd", documents=["e" * 300], truncate_prompt_tokens=3)
    assert [submit.prompt_token_ids for submit in queue.submits] == [tuple(b"bcd"), tuple(b"eee")]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "said"),
    [
        ("/v1/score", {}, 400, "text_1", "not none of them"),
        ("/v1/score", {"text_1": "a"}, 400, "text_1", "not text_1"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, 400, "text_1", "not documents, text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "items": "c"}, 400, "text_1", "not items, text_1, text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, 400, "text_1", "has 2 texts, and text_2 has 3"),
        ("/v1/score", {"text_1": "a", "text_2": []}, 400, "text_2", "must not be empty"),
        ("/v1/score", {"queries": "", "items": "a"}, 400, "queries", "must not be empty"),
        ("/v1/score", {"text_1": "a", "text_2": [1]}, 400, "text_2", "text_2 must be a string, or a list"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "n": 1}, 400, "n", "unknown field: n"),
        ("/v1/score", {"text_1": "a", "text_2": "b" * 257}, 400, "text_2", "context length is 256 tokens"),
        ("/rerank", {"documents": ["a"]}, 400, "query", "query is required"),
        ("/rerank", {"query": "a"}, 400, "documents", "documents is required"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents", "must not be empty"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, 400, "documents", "must not be empty"),
        ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}, 400, "documents", "or of objects"),
        ("/rerank", {"query": "a", "documents": [{"text": "c", "id": 1}]}, 400, "documents[0].id", "unknown field"),
        ("/rerank", {"query": "a", "documents": ["b"] * 4097}, 400, "documents", "up to 4096"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n", "must be greater"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "gpt"}, 404, "model", "does not exist"),
        ("/rerank", {"query": "a" * 300, "documents": ["b"]}, 400, "query", "context length is 256 tokens"),
    ],
)
def test_an_invalid_request_names_the_field(
    client: TestClient, queue: EchoChannel, path: str, fields: dict[str, Any], status: int, param: str, said: str
) -> None:
    response = client.post(path, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert said in error["message"]
    assert queue.submits == []


def test_full_draining_and_failing_servers_reject_scores(
    client: TestClient, frontend: Frontend, lifecycle: Lifecycle, queue: EchoChannel
) -> None:
    fields = {"query": "a", "documents": ["b"]}
    queue.failure = "the engine failed"
    assert client.post("/rerank", json=fields).json()["error"]["code"] == "engine_failed"
    queue.failure, queue.answers = None, False
    for uid in "abcd":
        frontend.context.engine_client.submit(make_request(make_choice(uid)))
    assert client.post("/rerank", json=fields).json()["error"]["code"] == "queue_full"
    lifecycle.enter(Phase.DRAINING)
    assert client.post("/v1/score", json={"text_1": "a", "text_2": "b"}).json()["error"]["code"] == "draining"


def test_a_retry_with_the_same_idempotency_key_is_not_computed_again(client: TestClient, queue: EchoChannel) -> None:
    headers = {"Idempotency-Key": "k"}
    first, second = (client.post("/rerank", json={"query": "a", "documents": ["b"]}, headers=headers) for _ in range(2))
    assert first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"
    assert len(queue.submits) == 2


class AnswerChannel(EchoChannel):
    """Fake worker that says the allowed token. `logprobs`: those of yes and no by the prompt's last letter."""

    logprobs: dict[str, tuple[float, float]]
    rerank: RerankPrompt
    num_top = 2

    def submit(self, message: bytes) -> None:
        for command in decode_commands(message).commands:
            assert isinstance(command, Submit)
            self.submits.append(command)
            (answer_id,) = command.params.allowed_token_ids
            yes, no = self.logprobs[chr(command.prompt_token_ids[-2])]
            top = ((self.rerank.no_id, no), (self.rerank.yes_id, yes))[: self.num_top]
            logprob = yes if answer_id == self.rerank.yes_id else no
            entry = TokenLogprob(token_id=answer_id, logprob=logprob, rank=1, top=top)
            finish = make_finish(FinishReason.LENGTH)
            self.frontend.receive(
                encode_events([make_delta(command.uid, ids=(answer_id,), logprobs=(entry,), finish=finish)])
            )


@pytest.fixture(scope="module")
def yes_no_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny model with tokens for yes and no."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("yes-no") / "tiny", b"yes", b"no")


class TestYesNo:
    """Scores by the probability of yes."""

    @pytest.fixture
    def settings(self, yes_no_checkpoint: Path, tmp_path: Path) -> ServeSettings:
        (tmp_path / "template").write_text(TEMPLATE)
        return ServeSettings(
            checkpoint=yes_no_checkpoint,
            rerank_template=str(tmp_path / "template"),
            max_num_running=2,
            max_waiting_requests=2,
        )

    @pytest.fixture
    def queue(self) -> AnswerChannel:
        return AnswerChannel()

    @pytest.fixture
    def worker(self, queue: AnswerChannel, frontend: Frontend) -> AnswerChannel:
        rerank = frontend.context.served.rerank
        assert rerank is not None
        queue.rerank = rerank
        queue.logprobs = {"a": (-0.5, -2.0), "b": (-9.0, -1.0), "c": (-3.0, -3.0)}
        return queue

    @pytest.mark.parametrize("num_top", [0, 1, 2])
    def test_a_score_is_the_share_of_yes(self, client: TestClient, worker: AnswerChannel, num_top: int) -> None:
        """The second sequence of a pair is computed only if no is not among the most likely tokens."""
        worker.num_top = num_top
        body = ask(client, "/v1/score", text_1="q", text_2=["a", "b", "c"])
        assert scores(body) == pytest.approx([1 / (1 + math.exp(-1.5)), 1 / (1 + math.exp(8)), 0.5])
        assert len(worker.submits) == (3 if num_top else 6)
        prompts = {submit.prompt_token_ids for submit in worker.submits}
        end = load_tokenizer_of(worker).special_tokens[EOS]
        assert (end, *b"Q:q D:a", end) in prompts
        assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
        ranked = ask(client, "/rerank", query="q", documents=["b", "c", "a"], top_n=2)
        assert [each["index"] for each in ranked["results"]] == [2, 1]
        params = worker.submits[0].params
        assert (params.max_tokens, params.logprobs) == (1, MAX_LOGPROBS)
        assert params.allowed_token_ids == (worker.rerank.yes_id,)

    def test_special_tokens_in_the_texts_are_text(self, client: TestClient, worker: AnswerChannel) -> None:
        ask(client, "/v1/score", text_1=EOS + "{document}", text_2=EOS + "a")
        tokenizer = load_tokenizer_of(worker)
        begin, *ids, end = worker.submits[0].prompt_token_ids
        assert begin == end == tokenizer.special_tokens[EOS]
        assert begin not in ids
        assert tokenizer.decode(ids) == f"Q:{EOS}{{document}} D:{EOS}a"

    def test_truncation_keeps_the_template_and_the_beginning_of_the_document(
        self, client: TestClient, worker: AnswerChannel
    ) -> None:
        for kept, length in ((20, 20), (-1, 255)):
            ask(client, "/v1/score", text_1="q", text_2="a" * 300, truncate_prompt_tokens=kept)
            ids = worker.submits[-1].prompt_token_ids
            end = load_tokenizer_of(worker).special_tokens[EOS]
            assert len(ids) == length
            assert ids == (end, *b"Q:q D:", *b"a" * (length - 8), end)

    def test_a_prompt_over_the_context_is_rejected(self, client: TestClient, worker: AnswerChannel) -> None:
        response = client.post("/rerank", json={"query": "q", "documents": ["a", "a" * 300]})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "documents"
        assert worker.submits == []


def load_tokenizer_of(worker: AnswerChannel) -> ByteLevelTokenizer:
    tokenizer = worker.frontend.context.served.tokenizer
    assert isinstance(tokenizer, ByteLevelTokenizer)
    return tokenizer


def test_the_template_of_a_known_checkpoint_is_found_by_its_name(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(b"yes", b"no")
    settings = ServeSettings(checkpoint=tmp_path / "Qwen3-Reranker-0.6B")
    prompt = read_rerank_prompt(settings, tokenizer)
    assert prompt is not None
    pairs = RerankRequest.parse(b'{"query": "Q", "documents": ["D"]}').pairs
    text = tokenizer.decode(prompt.encode(pairs, "Q", "D"))
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets")
    assert "<Query>: Q\n<Document>: D<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n" in text
    assert read_rerank_prompt(ServeSettings(checkpoint=tmp_path / "Qwen3-0.6B"), tokenizer) is None
    assert read_rerank_prompt(settings, tiny_tokenizer()) is None
    embedding = settings.model_copy(update={"score_method": "embedding"})
    assert read_rerank_prompt(embedding, tokenizer) is None


@pytest.mark.parametrize(
    ("fields", "words", "said"),
    [
        ({"score_method": "yes-no"}, [b"yes", b"no"], "needs a template; give a file with --rerank-template"),
        ({"score_method": "yes-no", "rerank_template": "good"}, [b"yes"], "one token each; use --score-method"),
        ({"rerank_template": "missing"}, [b"yes", b"no"], "no such file; give auto, none or a text file"),
        ({"rerank_template": "bad"}, [b"yes", b"no"], "a template needs {query} and {document}"),
    ],
)
def test_unusable_settings_are_reported_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str], words: Sequence[bytes], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").write_text("{query}{document}")
    (tmp_path / "bad").write_text("{query}")
    settings = ServeSettings.model_validate({"checkpoint": tmp_path, **fields})
    with pytest.raises((SettingsError, CheckpointError), match=said):
        read_rerank_prompt(settings, tiny_tokenizer(*words))
