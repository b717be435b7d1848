"""Handlers of `/v1/messages`, Anthropic's Messages API, by the code of chat completions."""

from fastapi import Request
from starlette.responses import Response

from service.api.completions import Completions
from service.api.context import ApiContext
from service.api.messages_builder import MessagesBuilder
from service.http.request_io import REQUEST_ID, json_response
from service.protocol.messages import CountTokensRequest, MessagesRequest, TokenCount


class Messages:
    """Handlers of `/v1/messages` and `/v1/messages/count_tokens`."""

    def __init__(self, context: ApiContext, completions: Completions) -> None:
        self._context = context
        self._completions = completions

    async def create(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = MessagesRequest.parse(body)
        response = await self._completions.complete(
            asked.chat(),
            MessagesBuilder,
            request,
            arrival_seconds=arrival_seconds,
            size=len(body),
            request_id=getattr(request.state, REQUEST_ID, None),
        )
        self._completions.report_ignored_fields(response, asked)
        return response

    async def count_tokens(self, request: Request) -> Response:
        """Handle `POST /v1/messages/count_tokens`. Return the number of prompt tokens, and generate nothing."""
        asked = CountTokensRequest.parse(await self._context.read_body(request))
        self._context.processor.check_model(asked.model)
        plan = await self._context.chat.plan(asked.chat())
        response = json_response(TokenCount(input_tokens=len(plan.token_ids)))
        self._completions.report_ignored_fields(response, asked)
        return response
