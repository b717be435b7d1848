"""Routes of `/inspect/attention`: attention weights of a prompt, computed by the worker between its steps.

One such computation is a look. A look changes no state and uses no KV-cache. Three limits bound the delay of other
requests: `--max-inspect-tokens` per prompt, `MAX_INSPECTIONS` looks in progress, and one look per step.

Legend: H heads, T tokens of the prompt.
"""

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field
from starlette.types import Receive

from model.config import ModelConfig
from service.admission.queue_policy import QueueLimits
from service.http.request_io import json_response, read_body
from service.ipc.messages import AttentionQuery, AttentionResult
from service.preprocess.request_processor import RequestProcessor
from service.protocol.completions import RequestModel, TokenIds, parse_body
from service.protocol.errors import (
    ApiError,
    ClientGone,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    Overloaded,
)
from service.protocol.logprobs import format_token_name
from service.requests.engine_client import EngineClient
from service.requests.inflight import InflightQuery

# Limit of looks in progress. The worker computes one look between two steps.
MAX_INSPECTIONS = 4
# Weights in the response are rounded to millionths: a row of 512 weights sums to 1 within 3e-4.
_MILLION = 1_000_000
_WANTED = {
    "prompt": "must be a non-empty string or list of token ids",
    "head": 'must be the index of a head, from 0, or "all"',
}


class RouteDisabled(ApiError):
    """Rejection by a route that is disabled on this server."""

    status, type, code = 403, "invalid_request_error", "switched_off"


class AttentionRequest(RequestModel):
    """Body of `POST /inspect/attention`."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[TokenIds, Field(min_length=1)]
    layer: Annotated[int, Field(ge=0, lt=2**31, description="from 0")]
    head: Annotated[int, Field(ge=0, lt=2**31)] | Literal["all"] | None = "all"
    model: str | None = None


class AttentionLimits(msgspec.Struct, kw_only=True):
    """Response of `GET /inspect/attention`: the limits of a look."""

    model: str
    num_layers: int
    num_heads: int
    max_tokens: int


class LookTimings(msgspec.Struct, kw_only=True):
    """Milliseconds from arrival to response, and the part of that time in which the worker computed."""

    total_ms: float
    compute_ms: float


class Attention(msgspec.Struct, kw_only=True):
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
    timings: LookTimings


class Inspection:
    """Handlers of the routes. Runs in the API process' event loop only.

    Args:
        processor: checks model names and encodes prompts.
        config: has the numbers of layers and heads.
        max_tokens: limit of a prompt; 0 disables the routes.
        max_body_bytes: limit of a request body.
        reject_when_draining: raises `Draining` if the service accepts no new requests.
        engine_client: sends looks to the worker, and again to its replacement if the worker dies.
        limits: limits of the time that a look may wait in the queue.
        on_change: called when the number of looks in progress has changed.
    """

    def __init__(
        self,
        *,
        processor: RequestProcessor,
        config: ModelConfig,
        max_tokens: int,
        max_body_bytes: int,
        reject_when_draining: Callable[[], None],
        engine_client: EngineClient,
        limits: QueueLimits,
        on_change: Callable[[], None],
    ) -> None:
        self._processor = processor
        self._config = config
        self._max_tokens = min(max_tokens, processor.max_context_length)
        self._max_body_bytes = max_body_bytes
        self._refuse_when_draining = reject_when_draining
        self._engine_client = engine_client
        self._limits = limits
        self._on_change = on_change

    # Routes.

    async def limits(self) -> Response:
        """`GET /inspect/attention`."""
        self._refuse_when_off()
        limits = AttentionLimits(
            model=self._processor.model_name,
            num_layers=self._config.num_layers,
            num_heads=self._config.num_heads,
            max_tokens=self._max_tokens,
        )
        return json_response(limits)

    async def attention(self, request: Request) -> Response:
        """`POST /inspect/attention`."""
        arrival_seconds = time.monotonic()
        self._refuse_when_off()
        body = await read_body(request, max_bytes=self._max_body_bytes)
        look = self._plan(_parse(body))
        self._refuse_when_draining()
        if self._engine_client.num_looks >= MAX_INSPECTIONS:
            raise Overloaded(f"{MAX_INSPECTIONS} looks are under way; try again later", retry_after_seconds=1.0)
        waiting = asyncio.get_running_loop().create_future()
        terms = self._limits.terms(request, None)
        live = InflightQuery(submit=look, arrival_seconds=arrival_seconds, terms=terms, answer=waiting)
        looked = await self._answer(live, request.receive)
        if looked.weights is None:
            raise EngineFailed("the engine failed on this request", retry=True)
        # In a thread, because encoding is slow: 8 heads of 128 tokens are 131,000 numbers.
        answer = await asyncio.to_thread(self._attention, look, looked, arrival_seconds)
        return answer

    def _refuse_when_off(self) -> None:
        if self._max_tokens == 0:
            raise RouteDisabled(
                "attention inspection is switched off on this server; start it with --max-inspect-tokens above 0"
            )

    def _plan(self, asked: AttentionRequest) -> AttentionQuery:
        """Build the command for the worker.

        Raises:
            ModelNotFound, InvalidRequest: see `RequestProcessor`. Also if the layer or head does not exist.
        """
        self._processor.check_model(asked.model)
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
        token_ids = tuple(self._token_ids(asked.prompt))
        return AttentionQuery(uid=uuid.uuid4().hex, token_ids=token_ids, layer=asked.layer, heads=heads)

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            # Reject a text that is too long for any tokenization before spending time on tokenizing it.
            at_least = self._processor.least_tokens(prompt)
            if at_least > self._max_tokens:
                raise self._too_long(f"at least {at_least}")
            token_ids = self._processor.encode(prompt)
        else:
            token_ids = prompt
            self._processor.check_ids(token_ids, "prompt")
        if len(token_ids) > self._max_tokens:
            raise self._too_long(str(len(token_ids)))
        return token_ids

    def _too_long(self, num_tokens: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, but inspection takes at most {self._max_tokens}; shorten the prompt",
            param="prompt",
        )

    async def _answer(self, live: InflightQuery, receive: Receive) -> AttentionResult:
        """Send the look to the worker and wait for the result. A disconnect of the client cancels the look.

        Raises:
            ClientGone: the client disconnected.
            ApiError: the look has failed or waited too long, or the service stops.
        """
        self._engine_client.submit_query(live)
        self._on_change()
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((live.answer, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            self._engine_client.close(live)
            self._on_change()
        if not live.answer.done():
            raise ClientGone("the client closed the connection")
        return live.answer.result()

    def _attention(self, look: AttentionQuery, looked: AttentionResult, arrival_seconds: float) -> Response:
        assert looked.weights is not None
        tokenizer = self._processor.tokenizer
        weights = array("f", looked.weights)
        answer = Attention(
            model=self._processor.model_name,
            layer=look.layer,
            heads=list(look.heads),
            num_layers=self._config.num_layers,
            num_heads=self._config.num_heads,
            token_ids=list(look.token_ids),
            tokens=[format_token_name(tokenizer, token_id) for token_id in look.token_ids],
            weights=_squares(weights, len(look.heads), len(look.token_ids)),
            timings=LookTimings(
                total_ms=round(1000 * (time.monotonic() - arrival_seconds), 3),
                compute_ms=round(1000 * looked.compute_seconds, 3),
            ),
        )
        return json_response(answer)


def _parse(body: bytes) -> AttentionRequest:
    try:
        return parse_body(AttentionRequest, body)
    except InvalidRequest as error:
        if error.param not in _WANTED:
            raise
        # Pydantic reports the failure of only one branch of a union, so the whole condition is stated here.
        raise InvalidRequest(f"{error.param} {_WANTED[error.param]}", param=error.param) from None


def _squares(weights: Sequence[float], num_heads: int, num_tokens: int) -> list[list[list[float]]]:
    """Return rounded (H, T, T) weights from the lower triangles, which are stored one after another."""
    squares, start = [], 0
    for _ in range(num_heads):
        square = []
        for length in range(1, num_tokens + 1):
            # Same as round(weight, 6), which takes six times as long: 60 ms for 8 heads of 128 tokens.
            row = [int(weight * _MILLION + 0.5) / _MILLION for weight in weights[start : start + length]]
            square.append(row + [0.0] * (num_tokens - length))
            start += length
        squares.append(square)
    return squares


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
