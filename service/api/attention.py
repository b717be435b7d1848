"""Routes of `/inspect/attention`: attention weights of a prompt, computed by the worker between two engine steps."""

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
from service.protocol import errors
from service.protocol.logprobs import format_token_name
from service.protocol.request_model import RequestModel, TokenIds
from service.requests.inflight import InflightQuery

# Maximum attention queries in progress. Two more limits bound the delay of other requests: a prompt has at most
# `--max-inspect-tokens` tokens, and the worker computes at most one query between two engine steps.
MAX_INSPECTIONS = 4
# Decimals of a weight in the response: a row of 512 weights sums to 1 within 3e-4.
_DECIMALS = 6


class AttentionRequest(RequestModel):
    """Body of `POST /inspect/attention`."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        "prompt": "must be a non-empty string or list of token ids",
        "head": 'must be the index of a head, from 0, or "all"',
    }

    prompt: Annotated[str, Field(min_length=1)] | Annotated[TokenIds, Field(min_length=1)]
    layer: Annotated[int, Field(ge=0, lt=2**31, description="index of the layer, from 0")]
    head: Annotated[int, Field(ge=0, lt=2**31)] | Literal["all"] | None = "all"
    model: str | None = None


class AttentionLimits(msgspec.Struct, kw_only=True):
    """Response of `GET /inspect/attention`. `num_heads` is per layer, `max_tokens` is the limit of a prompt."""

    model: str
    num_layers: int
    num_heads: int
    max_tokens: int


class AttentionTimings(msgspec.Struct, kw_only=True):
    """Times in milliseconds: `total_ms` from the request's arrival to its response, `compute_ms` in the worker."""

    total_ms: float
    compute_ms: float


class AttentionWeights(msgspec.Struct, kw_only=True):
    """Attention weights of a layer: in head `heads[i]`, prompt token t attends to token s with `weights[i][t][s]`."""

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
    """Handlers of the attention inspection routes."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._config = context.served.manifest.config
        self._max_tokens = min(context.settings.max_inspect_tokens, context.processor.max_context_length)

    async def limits(self) -> Response:
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
        arrival_seconds, context = time.monotonic(), self._context
        self._check_enabled()
        query = self._plan(AttentionRequest.parse(await context.read_body(request)))
        context.reject_when_draining()
        if context.engine_client.num_queries >= MAX_INSPECTIONS:
            raise errors.Overloaded(
                f"{MAX_INSPECTIONS} attention queries are in progress, which is the limit; try again later",
                retry_after_seconds=1.0,
            )
        live = InflightQuery(
            submit=query,
            arrival_seconds=arrival_seconds,
            terms=read_queue_policy(request, None, context.settings),
            answer=asyncio.get_running_loop().create_future(),
        )
        result = await self._compute(live, request.receive)
        if result.weights is None:
            raise errors.EngineFailed("the engine failed on this attention query; retry the query", retry=True)
        # In a thread, because encoding is slow: 8 heads of 128 tokens are 131,000 numbers.
        return await asyncio.to_thread(self._encode, query, result, arrival_seconds)

    def _check_enabled(self) -> None:
        if self._max_tokens == 0:
            raise errors.RouteDisabled(
                "attention inspection is switched off on this server; start it with --max-inspect-tokens N, N above 0"
            )

    def _plan(self, asked: AttentionRequest) -> AttentionQuery:
        """Return the attention query to send to the worker.

        Raises an `ApiError` for an adapter, an unknown model, layer or head, and a prompt that is invalid or too long.
        """
        processor = self._context.processor
        if processor.adapter_key(asked.model):
            raise errors.InvalidRequest.of(
                "model", ": attention is computed for the base model only; name the base model"
            )
        num_layers, num_heads = self._config.num_layers, self._config.num_heads
        heads = tuple(range(num_heads)) if asked.head in ("all", None) else (int(asked.head),)
        for name, index, count in (("layer", asked.layer, num_layers), ("head", heads[0], num_heads)):
            if index >= count:
                raise errors.InvalidRequest(
                    f"attention {name} {index} does not exist; this model has {name}s 0 to {count - 1}", param=name
                )
        token_ids = processor.encode_prompt(
            asked.prompt,
            "prompt",
            max_tokens=self._max_tokens,
            limit=f"attention inspection takes at most {self._max_tokens} tokens",
            clause="; shorten the prompt",
        )
        return AttentionQuery(uid=uuid.uuid4().hex, token_ids=tuple(token_ids), layer=asked.layer, heads=heads)

    async def _compute(self, live: InflightQuery, receive: Receive) -> AttentionResult:
        """Send an attention query to the worker, and return the result, with weights None if the engine failed.

        Raises ClientGone if the client disconnects, and an `ApiError` if the service ends the query before the worker
        has answered it, as at a queue timeout.
        """
        self._context.engine_client.submit(live)
        watch = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((live.answer, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            self._context.engine_client.finish(live)
        if not live.answer.done():
            raise errors.ClientGone("the client closed the connection")
        return live.answer.result()

    def _encode(self, query: AttentionQuery, result: AttentionResult, arrival_seconds: float) -> Response:
        assert result.weights is not None
        processor, num_heads, num_tokens = self._context.processor, len(query.heads), len(query.token_ids)
        # The worker sends the lower triangle of each head's matrix, as float32.
        squares = np.zeros((num_heads, num_tokens, num_tokens))
        rows, columns = np.tril_indices(num_tokens)
        squares[:, rows, columns] = np.frombuffer(result.weights, dtype=np.float32).reshape(num_heads, -1)
        return json_response(
            AttentionWeights(
                model=processor.model_name,
                layer=query.layer,
                heads=list(query.heads),
                num_layers=self._config.num_layers,
                num_heads=self._config.num_heads,
                token_ids=list(query.token_ids),
                tokens=[format_token_name(processor.tokenizer, token_id) for token_id in query.token_ids],
                weights=squares.round(_DECIMALS).tolist(),
                timings=AttentionTimings(
                    total_ms=round(1000 * (time.monotonic() - arrival_seconds), 3),
                    compute_ms=round(1000 * result.compute_seconds, 3),
                ),
            )
        )
