"""Request and response bodies of `/v1/score` and `/v1/rerank`, as in vLLM, Jina and Cohere."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from service.protocol.completions import NumKept, Timeout
from service.protocol.embeddings import EmbeddingUsage
from service.protocol.errors import InvalidRequest
from service.protocol.request_model import MAX_PROMPTS, NUM_KEPT_ERROR, RequestModel, Texts

_TEXTS_ERROR = f"must be a string, or a list of up to {MAX_PROMPTS} strings"
# Names of the two fields in versions of vLLM.
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPairs:
    """Pairs of a query and a document: one query for all documents, or one query for each document.

    query_param, document_param: request fields of the texts, for error messages.

    Raises:
        InvalidRequest: a text is missing or empty, or the numbers of texts do not fit.
    """

    queries: list[str]
    documents: list[str]
    query_param: str
    document_param: str

    def __post_init__(self) -> None:
        for texts, param in ((self.queries, self.query_param), (self.documents, self.document_param)):
            if not texts or not all(texts):
                raise InvalidRequest.of(param, " must not be empty, nor contain an empty text")
        if len(self.queries) not in (1, len(self.documents)):
            raise InvalidRequest.of(
                self.query_param,
                f" has {len(self.queries)} texts, and {self.document_param} has "
                f"{len(self.documents)}; give one text in {self.query_param}, or as many as in {self.document_param}",
            )

    @property
    def indices(self) -> list[tuple[int, int]]:
        """Index of the query and index of the document, for each pair."""
        return [(0 if len(self.queries) == 1 else index, index) for index in range(len(self.documents))]


class PairsRequest(RequestModel):
    """Fields common to the bodies of `/v1/score` and `/v1/rerank`."""

    model: str | None = None
    truncate_prompt_tokens: NumKept | None = None
    timeout: Timeout | None = None
    user: str | None = None

    @property
    @abstractmethod
    def pairs(self) -> TextPairs:
        """Texts to score. Raises InvalidRequest for missing, empty or unpaired texts."""


class ScoreRequest(PairsRequest):
    """Body of `POST /v1/score`: two fields with a text or a list of texts, by any of vLLM's three pairs of names."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys((name for pair in _PAIRS for name in pair), _TEXTS_ERROR),
        "truncate_prompt_tokens": NUM_KEPT_ERROR,
    }

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None

    def check_fields(self) -> None:
        """Raise InvalidRequest unless exactly one pair of fields is given, with texts that form pairs."""
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        if not any(given == set(pair) for pair in _PAIRS):
            names = ", ".join(sorted(given)) or "none of them"
            raise InvalidRequest(
                f"give the texts as text_1 and text_2, queries and documents, or queries and items, not {names}",
                param="text_1",
            )
        _ = self.pairs

    @property
    def pairs(self) -> TextPairs:
        query_param, document_param = next(
            pair for pair in _PAIRS if all(getattr(self, name) is not None for name in pair)
        )
        queries, documents = (
            [value] if isinstance(value, str) else value
            for value in (getattr(self, query_param), getattr(self, document_param))
        )
        return TextPairs(queries=queries, documents=documents, query_param=query_param, document_param=document_param)


class DocumentText(RequestModel):
    """Field `documents[]`, if a document is an object instead of a string."""

    text: str


class RerankRequest(PairsRequest):
    """Body of `POST /v1/rerank`."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        "documents": f'must be a list of up to {MAX_PROMPTS} strings, or of objects {{"text": …}}',
        "truncate_prompt_tokens": NUM_KEPT_ERROR,
    }

    query: str
    documents: Texts | Annotated[list[DocumentText], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1, lt=2**31, description="number of documents to return")] | None = None
    return_documents: Annotated[bool | None, Field(description="return the text of each document")] = True

    def check_fields(self) -> None:
        """Raise InvalidRequest for an empty query or document."""
        _ = self.pairs

    @property
    def pairs(self) -> TextPairs:
        documents = [each if isinstance(each, str) else each.text for each in self.documents]
        return TextPairs(queries=[self.query], documents=documents, query_param="query", document_param="documents")


class ScoredPair(msgspec.Struct, kw_only=True):
    """Score of one pair of texts: the higher, the better they fit."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """Response body of `/v1/score`: one score per pair, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoredPair]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct, kw_only=True):
    """Field `results[].document`: the text of a ranked document."""

    text: str


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Score of the document at `index` in the request's field `documents`. Its text is absent if it was not wanted."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(msgspec.Struct, kw_only=True):
    """Response body of `/v1/rerank`: the `top_n` documents that fit the query best, or all, best first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]
