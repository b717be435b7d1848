"""Request and response schemas of `/v1/embeddings`, and the encoding of vectors.

Legend: N texts, E hidden size, D dimensions of the response.
"""

import base64
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Self

import msgspec
import numpy as np
from pydantic import Field

from service.protocol.completions import MAX_PROMPTS, NumKept, RequestModel, Texts, Timeout, TokenIds, parse_body
from service.protocol.errors import InvalidRequest

# Decimals of a number in JSON: float32 has no more between 0.01 and 1.
_DECIMALS = 9
_WANTED = {
    "input": f"must be a string, a list of strings, token ids, or a list of token-id lists, up to {MAX_PROMPTS}",
    "truncate_prompt_tokens": "must be a whole number from 1, or -1 for as many tokens as the context allows",
}


class EmbeddingRequest(RequestModel):
    """`POST /v1/embeddings`."""

    input: Annotated[
        str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)],
        Field(description=f"a string, token ids, or a list of up to {MAX_PROMPTS} of either"),
    ]
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

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Validate a JSON body.

        Raises:
            InvalidRequest: malformed JSON, wrong type, value out of range, unknown field.
        """
        try:
            return parse_body(cls, body)
        except InvalidRequest as error:
            if error.param not in _WANTED or error.message.endswith("is required"):
                raise
            # Pydantic's message names only one branch of the union.
            raise InvalidRequest(f"{error.param} {_WANTED[error.param]}", param=error.param) from None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """Texts of the request, in order.

        Raises:
            InvalidRequest: there is no text, or a text is empty.
        """
        inputs: Sequence[str | list[int]]
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            inputs = [self.input]
        else:
            inputs = self.input  # type: ignore[assignment]
        if not inputs or not all(inputs):
            raise InvalidRequest("input must not be empty", param="input")
        return inputs


class Embedding(msgspec.Struct, kw_only=True):
    """Vector of one text, of length 1. As base64, the vector is little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all texts. Both counts are equal, since nothing is generated."""

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
    """Yield the encoded vectors one by one.

    Args:
        vectors: float32 vectors of length 1, as bytes.
        dimensions: number of leading dimensions to keep, scaled to length 1; None keeps all dimensions.
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
