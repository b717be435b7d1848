"""Handlers of `/v1/responses`, OpenAI's Responses API, by the code of chat completions."""

import asyncio
import uuid
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from service.api.completions import Completions
from service.api.context import ApiContext
from service.api.responses_builder import ResponsesBuilder
from service.http.middleware import KEY_NAME
from service.http.request_io import json_response
from service.protocol.errors import ApiError, InvalidRequest, ResponseGone
from service.protocol.model_responses import DeletedResponse, InputItemList
from service.protocol.responses_request import InputItem, ResponsesRequest, read_items, rename_fields
from service.requests.response_store import BufferedResponse, BufferedResponseReplay, RequestIdentity
from service.requests.stored_responses import StoredResponse, StoredResponses

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class ResponsesApi:
    """Handlers of `/v1/responses` and its sub-paths, and the store of the responses."""

    def __init__(self, context: ApiContext, completions: Completions) -> None:
        self._context = context
        self._completions = completions
        settings = context.settings
        self.store = StoredResponses(
            max_bytes=settings.response_store_size, keep_seconds=settings.response_store_seconds
        )

    async def create(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = ResponsesRequest.parse(body)
        tenant = _tenant(request)
        earlier: list[dict[str, Any]] = []
        if (previous_id := asked.previous_response_id) is not None:
            earlier = self._conversation(previous_id, tenant)
        record = self._record(asked, tenant, earlier)
        try:
            response = await self._completions.complete(
                asked.chat(read_items(earlier)),
                ResponsesBuilder,
                request,
                arrival_seconds=arrival_seconds,
                size=len(body),
                origin=asked,
                record=record,
            )
        except ApiError as error:
            rename_fields(error)
            raise
        self._completions.report_ignored_fields(response, asked)
        if not asked.background:
            return response
        assert record is not None
        return self._run(record, response, is_stream=bool(asked.stream))

    def _conversation(self, response_id: str, tenant: str) -> list[dict[str, Any]]:
        """Return a stored response's input and output items.

        Raises ResponseNotFound if the response is not stored, and InvalidRequest if it is not finished.
        """
        record = self.store.get(response_id, tenant, param="previous_response_id")
        if not record.is_finished:
            raise InvalidRequest.of(
                "previous_response_id", f": the response {response_id} is not finished; wait for it, or cancel it"
            )
        return record.conversation()

    def _record(self, asked: ResponsesRequest, tenant: str, earlier: list[dict[str, Any]]) -> StoredResponse | None:
        """Return a new `StoredResponse` for a response; None if the response is not to be stored.

        The record adds itself to the store when the response ends. Raises an `ApiError` if the request needs the store
        but the store is off, or if the store has no room.
        """
        if asked.store is False or not self.store.is_on:
            if asked.store or asked.background:
                param = "store" if asked.store else "background"
                raise InvalidRequest.of(
                    param, f": this server stores no responses (--response-store-seconds 0); leave out {param}"
                )
            return None
        loop = asyncio.get_running_loop()
        # A thread may build a long response, and the event loop owns the store.
        record = StoredResponse(
            tenant,
            [*earlier, *map(_with_id, asked.items)],
            keep=lambda ended: loop.call_soon_threadsafe(self.store.add, ended),
        )
        self.store.check_room(record)
        return record

    def _run(self, record: StoredResponse, response: Response, *, is_stream: bool) -> Response:
        """Start to generate a response in the background. Return its present JSON, or with `is_stream` its events."""

        async def make() -> Response:
            return response

        def check(events: BufferedResponse) -> None:
            if events.failure is not None:
                record.fail(events.failure)

        identity = RequestIdentity(tenant=record.tenant, key=None, path="/v1/responses", digest=b"", timeout=None)
        state = record.body
        # No event ids, since clients resume by sequence number. With an Idempotency-Key, `ResponseStore` adds ids.
        record.events = BufferedResponse(
            make, identity, on_change=check, waste=lambda num_tokens: None, state={}, has_ids=False
        )
        self.store.add(record)
        return BufferedResponseReplay(record.events, is_again=False) if is_stream else _json(state)

    async def read(self, request: Request, response_id: str) -> Response:
        """Handle `GET /v1/responses/{response_id}`: return the response so far.

        With the query parameter `stream=true`, return the event stream of a background response instead.
        """
        record = self.store.get(response_id, _tenant(request))
        if (streams := request.query_params.get("stream", "false").lower()) not in ("true", "false"):
            raise InvalidRequest.of("stream", " must be true or false")
        if streams == "false":
            return _json(record.body)
        if record.events is None:
            raise InvalidRequest.of("stream", ": only the events of a background response are kept; leave out stream")
        start = _number(request, "starting_after", -1, least=0, most=10**9) + 1
        if start > record.events.num_parts:
            raise InvalidRequest.of("starting_after", " is after the last event; send a lower number")
        if not record.events.has(start):
            raise ResponseGone("the events after starting_after are no longer stored; leave out stream")
        return BufferedResponseReplay(record.events, start=start, is_again=False)

    async def delete(self, request: Request, response_id: str) -> Response:
        self.store.delete(self.store.get(response_id, _tenant(request)))
        return json_response(DeletedResponse(id=response_id))

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Handle `POST /v1/responses/{response_id}/cancel`. Cancel a background response, and return it.

        A response that has ended is returned as it is. Raises InvalidRequest for one that is not a background response.
        """
        record = self.store.get(response_id, _tenant(request))
        if record.events is None:
            raise InvalidRequest(
                "only a background response can be cancelled; close the connection of any other response"
            )
        record.cancel()
        return _json(record.body)

    async def input_items(self, request: Request, response_id: str) -> Response:
        """Handle `GET /v1/responses/{response_id}/input_items`: one page of the items that the response answers.

        These are the request's input items and, before them, all items of the conversation that the request continues.
        The default order is the latest first.
        """
        record = self.store.get(response_id, _tenant(request))
        limit = _number(request, "limit", 20, least=1, most=100)
        order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
        if order not in ("asc", "desc"):
            raise InvalidRequest.of("order", ' must be "asc" or "desc"')
        items: list[dict[str, Any]] = msgspec.json.decode(record.items)
        items = items if order == "asc" else items[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequest.of("after", ": no input item of the response has this id; send the id of one")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = [item["id"] for item in (*page[:1], *page[-1:])] or [None, None]
        return json_response(
            InputItemList(data=page, first_id=ends[0], last_id=ends[-1], has_more=len(items) > len(page))
        )


def _with_id(item: InputItem) -> dict[str, Any]:
    """Return an input item as the JSON object to store, with the client's id or a new one."""
    stored = item.stored()
    return {"id": item.id or f"{_ID_PREFIXES[stored['type']]}_{uuid.uuid4().hex}", **stored}


def _tenant(request: Request) -> str:
    """Return the name of a request's API key, which owns the stored response; empty on a server without keys."""
    return str(getattr(request.state, KEY_NAME, ""))


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    """Return an integer query parameter, or `default`. Raises InvalidRequest outside `least` to `most`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise InvalidRequest.of(name, f" must be a whole number from {least} to {most}")
    return int(text)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
