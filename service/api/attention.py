"""Routes of `/inspect/attention`: attention weights of a prompt, computed by the worker between two steps.

An attention query changes no state and uses no KV-cache. Three limits bound the delay of other requests:
`--max-inspect-tokens` per prompt, `MAX_INSPECTIONS` queries in progress, and one query per step.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field
from starlette.types import Receive

from service.admission.controller import read_queue_policy
from service.api.context import ApiContext
from service.http.request_io import json_response, wait_for_disconnect
from service.ipc.messages import AttentionQuery, AttentionResult
from service.protocol.errors import (
    ApiError,
    ClientGone,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
)
from service.protocol.logprobs import format_token_name
from service.protocol.request_model import RequestModel, TokenIds
from service.requests.inflight import InflightQuery

# Limit of queries in progress. The worker computes one query between two steps.
MAX_INSPECTIONS = 4
# Decimals of a weight in the response: a row of 512 weights sums to 1 within 3e-4.
_DECIMALS = 6


class RouteDisabled(ApiError):
    """Rejection by a route that is disabled on this server."""

    status, type, code = 403, "invalid_request_error", "switched_off"


class AttentionRequest(RequestModel):
    """Body of `POST /inspect/attention`."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        "prompt": "must be a non-empty string or list of token ids",
        "head": 'must be the index of a head, from 0, or "all"',
    }

    prompt: Annotated[str, Field(min_length=1)] | Annotated[TokenIds, Field(min_length=1)]
    layer: Annotated[int, Field(ge=0, lt=2**31, description="from 0")]
    head: Annotated[int, Field(ge=0, lt=2**31)] | Literal["all"] | None = "all"
    model: str | None = None


class AttentionLimits(msgspec.Struct, kw_only=True):
    """Response of `GET /inspect/attention`: the model's sizes, and the limit of a prompt."""

    model: str
    num_layers: int
    num_heads: int
    max_tokens: int


class AttentionTimings(msgspec.Struct, kw_only=True):
    """Milliseconds from arrival to response, and the part of that time in which the worker computed."""

    total_ms: float
    compute_ms: float


class AttentionWeights(msgspec.Struct, kw_only=True):
    """Weights of one layer: `weights[i][t][s]` is the weight of token s for query token t in head `heads[i]`."""

    object: str = "attention"
    model: str
    layer: int
    heads: list[int]
    num_layers: int
    num_heads: int
    token_ids: list[int]
    tokens: list[str]
    weights: list[list[list[float]]]
    timings: AttentionTimings


class Inspection:
    """Handlers of the routes. Runs in the API process' event loop only."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._config = context.served.manifest.config
        self._max_tokens = min(context.settings.max_inspect_tokens, context.processor.max_context_length)

    async def limits(self) -> Response:
        """Handle `GET /inspect/attention`."""
        self._check_enabled()
        return json_response(
            AttentionLimits(
                model=self._context.processor.model_name,
                num_layers=self._config.num_layers,
                num_heads=self._config.num_heads,
                max_tokens=self._max_tokens,
            )
        )

    async def attention(self, request: Request) -> Response:
        """Handle `POST /inspect/attention`."""
        arrival_seconds, context = time.monotonic(), self._context
        self._check_enabled()
        query = self._plan(AttentionRequest.parse(await context.read_body(request)))
        context.reject_when_draining()
        if context.engine_client.num_queries >= MAX_INSPECTIONS:
            raise Overloaded(
                f"{MAX_INSPECTIONS} attention queries are in progress; try again later", retry_after_seconds=1.0
            )
        live = InflightQuery(
            submit=query,
            arrival_seconds=arrival_seconds,
            terms=read_queue_policy(request, None, context.settings),
            answer=asyncio.get_running_loop().create_future(),
        )
        result = await self._compute(live, request.receive)
        if result.weights is None:
            raise EngineFailed("the engine failed on this request", retry=True)
        # In a thread, because encoding is slow: 8 heads of 128 tokens are 131,000 numbers.
        return await asyncio.to_thread(self._encode, query, result, arrival_seconds)

    def _check_enabled(self) -> None:
        if self._max_tokens == 0:
            raise RouteDisabled(
                "attention inspection is switched off on this server; start it with --max-inspect-tokens above 0"
            )

    def _plan(self, asked: AttentionRequest) -> AttentionQuery:
        """Build the worker's command. Raises InvalidRequest for an invalid prompt, layer or head."""
        processor = self._context.processor
        processor.check_model(asked.model)
        num_layers, num_heads = self._config.num_layers, self._config.num_heads
        if asked.layer >= num_layers:
            raise InvalidRequest(
                f"layer {asked.layer} does not exist; this model has layers 0 to {num_layers - 1}", param="layer"
            )
        heads = tuple(range(num_heads)) if asked.head in ("all", None) else (int(asked.head),)
        if heads[0] >= num_heads:
            raise InvalidRequest(
                f"head {asked.head} does not exist; this model has heads 0 to {num_heads - 1}", param="head"
            )
        token_ids = processor.encode_prompt(
            asked.prompt, "prompt", max_tokens=self._max_tokens, too_long=self._too_long
        )
        return AttentionQuery(uid=uuid.uuid4().hex, token_ids=tuple(token_ids), layer=asked.layer, heads=heads)

    def _too_long(self, num_tokens: int, prefix: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the prompt has {prefix}{num_tokens} tokens, but inspection takes at most {self._max_tokens}; "
            "shorten the prompt",
            param="prompt",
        )

    async def _compute(self, live: InflightQuery, receive: Receive) -> AttentionResult:
        """Send the query to the worker and wait for the result. Raises ClientGone if the client disconnects."""
        self._context.engine_client.submit(live)
        watch = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((live.answer, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            self._context.engine_client.finish(live)
        if not live.answer.done():
            raise ClientGone("the client closed the connection")
        return live.answer.result()

    def _encode(self, query: AttentionQuery, result: AttentionResult, arrival_seconds: float) -> Response:
        assert result.weights is not None
        processor = self._context.processor
        return json_response(
            AttentionWeights(
                model=processor.model_name,
                layer=query.layer,
                heads=list(query.heads),
                num_layers=self._config.num_layers,
                num_heads=self._config.num_heads,
                token_ids=list(query.token_ids),
                tokens=[format_token_name(processor.tokenizer, token_id) for token_id in query.token_ids],
                weights=_squares(result.weights, len(query.heads), len(query.token_ids)),
                timings=AttentionTimings(
                    total_ms=round(1000 * (time.monotonic() - arrival_seconds), 3),
                    compute_ms=round(1000 * result.compute_seconds, 3),
                ),
            )
        )


def _squares(triangles: bytes, num_heads: int, num_tokens: int) -> list[list[list[float]]]:
    """Return rounded square matrices from the heads' lower triangles (float32), stored one after another."""
    squares = np.zeros((num_heads, num_tokens, num_tokens))
    rows, columns = np.tril_indices(num_tokens)
    squares[:, rows, columns] = np.frombuffer(triangles, dtype=np.float32).reshape(num_heads, -1)
    rounded: list[list[list[float]]] = squares.round(_DECIMALS).tolist()
    return rounded
