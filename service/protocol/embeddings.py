"""Request and response bodies of `/v1/embeddings`, and the encoding of vectors."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from pydantic import Field

from service.protocol.completions import NumKept, Timeout
from service.protocol.request_model import NUM_KEPT_ERROR, PROMPTS_ERROR, Prompts, RequestModel

# Decimals of a number in JSON: float32 has no more between 0.01 and 1.
_DECIMALS = 9


class EmbeddingRequest(RequestModel):
    """`POST /v1/embeddings`."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {"input": PROMPTS_ERROR, "truncate_prompt_tokens": NUM_KEPT_ERROR}

    input: Prompts
    model: str | None = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="base64: of little-endian float32")
    ] = "float"
    dimensions: Annotated[
        int | None, Field(ge=1, lt=2**31, description="number of leading dimensions to return, scaled to length 1")
    ] = None
    truncate_prompt_tokens: NumKept | None = None
    timeout: Timeout | None = None
    user: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """Vector of one text, of length 1. As base64, the vector is little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all texts. Both counts are equal, since no token is generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Response body: the vectors in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def write_vectors(
    vectors: Sequence[bytes], *, dimensions: int | None, as_text: Literal["float", "base64"] | None
) -> Iterator[list[float] | str]:
    """Yield embedding vectors as lists of numbers or as base64 texts.

    Args:
        vectors: float32 vectors of norm 1, as bytes. N vectors of E numbers each.
        dimensions: number D of leading dimensions to keep, scaled to norm 1; None keeps all dimensions.
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
