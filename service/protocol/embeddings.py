"""Request and response bodies of `/v1/embeddings`, and the encoding of vectors."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from pydantic import Field

from service.protocol.completions import NumKept, Timeout
from service.protocol.request_model import NUM_KEPT_ERROR, PROMPTS_ERROR, ParseSpecial, Prompts, RequestModel

# Decimals of a number in JSON: float32 has no more between 0.01 and 1.
_DECIMALS = 9


class EmbeddingRequest(RequestModel):
    """Body of `POST /v1/embeddings`."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {"input": PROMPTS_ERROR, "truncate_prompt_tokens": NUM_KEPT_ERROR}

    input: Prompts
    model: str | None = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="base64: the bytes of little-endian float32 numbers")
    ] = "float"
    dimensions: Annotated[
        int | None, Field(ge=1, lt=2**31, description="leading dimensions to return, rescaled to length 1")
    ] = None
    truncate_prompt_tokens: NumKept | None = None
    parse_special: ParseSpecial = None
    timeout: Timeout | None = None
    user: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """Embedding vector of one text, scaled to Euclidean length 1. In base64: its numbers as little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Total tokens of all texts of the request. Both counts are equal, because no token is generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Response body of `/v1/embeddings`: one vector per text, in the order of the request."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def write_vectors(
    vectors: Sequence[bytes], *, dimensions: int | None, as_text: Literal["float", "base64"] | None
) -> Iterator[list[float] | str]:
    """Yield each embedding vector as a list of numbers, or with `as_text="base64"` as a base64 string.

    Args:
        vectors: N vectors of norm 1, each as the bytes of its E float32 numbers.
        dimensions: number D of leading numbers to keep of each vector, rescaled to norm 1; None: keep all numbers.
    """
    vectors_NE = np.frombuffer(b"".join(vectors), dtype=np.float32).reshape(len(vectors), -1)
    if dimensions is not None:
        cut_ND = vectors_NE[:, :dimensions]
        lengths_N1 = np.linalg.norm(cut_ND, axis=1, keepdims=True)
        vectors_NE = cut_ND / np.maximum(lengths_N1, np.finfo(np.float32).tiny)
    for vector_E in vectors_NE:
        if as_text == "base64":
            yield base64.b64encode(vector_E.astype("<f4").tobytes()).decode()
        else:
            yield np.round(vector_E.astype(np.float64), _DECIMALS).tolist()
