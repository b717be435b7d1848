"""Routes `/v1/score` and `/v1/rerank`: how well a document fits a query, by one of two methods.

- embedding: cosine similarity of the embeddings of the two texts.
- yes-no: p(yes) / (p(yes) + p(no)) for the next token after a prompt with both texts (`--rerank-template`).
"""

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np
from fastapi import Request
from starlette.responses import Response

from model.sampling.params import MAX_LOGPROBS, SamplingParams
from service.admission.controller import QueuePolicy, read_queue_policy
from service.api.context import ApiContext, call
from service.api.embeddings import GroupedBody, embedding_choice, split_request
from service.ipc.messages import Submit, TokenDelta
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.preprocess.rerank_prompt import RerankPrompt
from service.protocol.embeddings import EmbeddingUsage
from service.protocol.errors import InvalidRequest
from service.protocol.responses import encode
from service.protocol.scores import (
    PairsRequest,
    RankedDocument,
    RankedText,
    Ranking,
    RerankRequest,
    ScoredPair,
    ScoreList,
    ScoreRequest,
    TextPairs,
)
from service.requests.inflight import Choice, InflightRequest

# Maximum prompt tokens of all pairs of a request, about as many as a body of 2 MiB can hold. Without this limit, one
# long query with many documents would have far more.
_MAX_TOKENS = 2**21

# Function from the scores and the token counts to the response body.
Write: TypeAlias = Callable[[list[float], EmbeddingUsage], msgspec.Struct]


class Scores:
    """Handlers of `/v1/score` and `/v1/rerank`."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def score(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = ScoreRequest.parse(body)

        def write(scores: list[float], usage: EmbeddingUsage) -> ScoreList:
            data = [ScoredPair(index=index, score=score) for index, score in enumerate(scores)]
            name, created = self._context.processor.response_name(asked.model), int(time.time())
            return ScoreList(id=f"score-{uuid.uuid4().hex}", created=created, model=name, data=data, usage=usage)

        return await self._respond(request, asked, arrival_seconds, write)

    async def rerank(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = RerankRequest.parse(body)

        def write(scores: list[float], usage: EmbeddingUsage) -> Ranking:
            documents = asked.pairs.documents
            best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
            results = [
                RankedDocument(
                    index=index,
                    relevance_score=scores[index],
                    document=None if asked.return_documents is False else RankedText(text=documents[index]),
                )
                for index in best
            ]
            name = self._context.processor.response_name(asked.model)
            return Ranking(id=f"rerank-{uuid.uuid4().hex}", model=name, usage=usage, results=results)

        return await self._respond(request, asked, arrival_seconds, write)

    async def _respond(self, request: Request, asked: PairsRequest, arrival_seconds: float, write: Write) -> Response:
        context, pairs = self._context, asked.pairs
        adapter = context.processor.adapter_key(asked.model)
        context.processor.check_num_prompts(len(pairs.documents), pairs.document_param)
        terms = read_queue_policy(request, asked.timeout, context.settings)
        make = self._embedding_choices if context.served.rerank is None else self._yes_no_choices
        num_characters = sum(len(pairs.queries[query]) + len(pairs.documents[index]) for query, index in pairs.indices)
        plan = partial(make, pairs, asked.truncate_prompt_tokens, arrival_seconds, adapter=adapter)
        choices = await call(plan, in_thread=num_characters > MAX_INLINE_CHARACTERS)
        groups = split_request(choices, terms, arrival_seconds, max_group=context.settings.max_num_running)
        response = (  # first: an exception then leaves no state
            SimilarityBody(groups, pairs, write, context)
            if context.served.rerank is None
            else YesNoBody(groups, context.served.rerank, terms, write, context)
        )
        context.engine_client.submit(groups[0])
        return response

    def _embedding_choices(
        self, pairs: TextPairs, num_kept: int | None, arrival_seconds: float, *, adapter: str
    ) -> list[Choice]:
        """Return for each text a choice that computes its embedding: first the queries, then the documents."""
        processor, settings = self._context.processor, self._context.settings
        texts = [(text, pairs.query_param) for text in pairs.queries]
        texts += [(text, pairs.document_param) for text in pairs.documents]
        choices = []
        for index, (text, param) in enumerate(texts):
            room = processor.max_context_length
            token_ids = processor.encode_prompt(text, param, max_tokens=room, num_kept=num_kept)
            choices.append(embedding_choice(index, token_ids, arrival_seconds, settings, adapter=adapter))
        return choices

    def _yes_no_choices(
        self, pairs: TextPairs, num_kept: int | None, arrival_seconds: float, *, adapter: str
    ) -> list[Choice]:
        """Return for each pair of texts a choice with a prompt of both, which can generate only the token `yes`.

        Raises InvalidRequest if a prompt exceeds the context, or all prompts together exceed `_MAX_TOKENS`.
        """
        processor, rerank = self._context.processor, self._context.served.rerank
        assert rerank is not None
        room = processor.max_context_length - 1
        max_tokens = room if num_kept == -1 else num_kept
        choices: list[Choice] = []
        num_tokens = 0
        for query, index in pairs.indices:
            token_ids = rerank.encode(pairs, pairs.queries[query], pairs.documents[index], max_tokens=max_tokens)
            processor.encode_prompt(token_ids, pairs.document_param, max_tokens=room)
            if (num_tokens := num_tokens + len(token_ids)) > _MAX_TOKENS:
                message = f"the prompts of all pairs have over {_MAX_TOKENS} tokens; send fewer documents per request"
                raise InvalidRequest(message, param=pairs.document_param)
            choices.append(_answer_choice(index, token_ids, rerank.yes_id, arrival_seconds, adapter))
        return choices


class ScoreBody(GroupedBody):
    """Response with the scores of all pairs, in the body that `write` returns. A subclass computes the scores."""

    def __init__(self, groups: list[InflightRequest], write: Write, context: ApiContext) -> None:
        super().__init__(groups, context)
        self._write = write

    def _encode(self) -> bytes:
        return encode(self._write(self._scores(), self._usage))

    @abstractmethod
    def _scores(self) -> list[float]: ...


class SimilarityBody(ScoreBody):
    """Response whose scores are cosine similarities of the embeddings of a pair's two texts, from -1 to 1."""

    def __init__(self, groups: list[InflightRequest], pairs: TextPairs, write: Write, context: ApiContext) -> None:
        super().__init__(groups, write, context)
        self._pairs = pairs

    def _scores(self) -> list[float]:
        joined = b"".join(self._vectors[index] for index in range(len(self._vectors)))
        vectors_NE = np.frombuffer(joined, dtype=np.float32).reshape(len(self._vectors), -1).astype(np.float64)
        first = len(self._pairs.queries)
        queries_NE = vectors_NE[[query for query, _ in self._pairs.indices]]
        similarities_N = (queries_NE * vectors_NE[first:]).sum(axis=1)
        scores: list[float] = similarities_N.clip(-1.0, 1.0).tolist()
        return scores


class YesNoBody(ScoreBody):
    """Response whose scores are p(yes) / (p(yes) + p(no)).

    The sequence of a pair can generate only `yes`, and reports the logprobs of `yes` and of the most likely tokens. If
    `no` is not among these tokens, a second sequence, which can generate only `no`, reports the logprob of `no`.
    """

    def __init__(
        self,
        groups: list[InflightRequest],
        rerank: RerankPrompt,
        terms: QueuePolicy,
        write: Write,
        context: ApiContext,
    ) -> None:
        super().__init__(groups, write, context)
        self._rerank = rerank
        self._later_terms = replace(terms, timeout_seconds=float("inf"))
        self._yes: dict[int, float] = {}
        self._no: dict[int, float] = {}

    def _receive(self, choice: Choice, delta: TokenDelta) -> None:
        assert delta.logprobs
        (entry,) = delta.logprobs
        assert entry.logprob is not None
        if entry.token_id == self._rerank.no_id:
            self._no[choice.index] = entry.logprob
            return
        self._yes[choice.index] = entry.logprob
        if (no := dict(entry.top).get(self._rerank.no_id)) is not None:
            self._no[choice.index] = no

    def _follow_up(self, group: InflightRequest) -> InflightRequest | None:
        no_id, arrival = self._rerank.no_id, group.arrival_seconds
        choices = [
            _answer_choice(choice.index, choice.submit.prompt_token_ids, no_id, arrival, choice.submit.adapter)
            for choice in group.choices
            if choice.index not in self._no
        ]
        if not choices:
            return None
        return InflightRequest(choices=choices, arrival_seconds=group.arrival_seconds, terms=self._later_terms)

    def _scores(self) -> list[float]:
        yes_N, no_N = (np.array([part[index] for index in sorted(part)]) for part in (self._yes, self._no))
        scores: list[float] = np.exp(yes_N - np.logaddexp(yes_N, no_N)).tolist()
        return scores


def _answer_choice(
    index: int, token_ids: Sequence[int], answer_id: int, arrival_seconds: float, adapter: str
) -> Choice:
    """Return a choice to generate `answer_id` after a prompt, with logprobs of it and the likeliest ids."""
    params = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=MAX_LOGPROBS, allowed_token_ids=(answer_id,)
    )
    submit = Submit(
        uid=uuid.uuid4().hex,
        prompt_token_ids=tuple(token_ids),
        params=params,
        arrival_seconds=arrival_seconds,
        adapter=adapter,
    )
    return Choice(index=index, prompt_index=index, prompt_text="", submit=submit)
