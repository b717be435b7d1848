"""Handlers of `/v1/completions` and `/v1/chat/completions`."""

import time
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from service.admission.controller import read_queue_policy
from service.api.context import ApiContext, call
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from service.api.streaming import CompletionBody, CompletionStream
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest
from service.requests.inflight import InflightRequest


class Completions:
    """Handlers that submit completion requests to the engine and return the streamed or whole responses."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def complete_prompt(self, request: Request) -> Response:
        return await self._context.respond(request, partial(self._respond, CompletionRequest, CompletionBuilder))

    async def complete_chat(self, request: Request) -> Response:
        return await self._context.respond(request, partial(self._respond, ChatCompletionRequest, ChatBuilder))

    async def _respond(
        self,
        model: type[CompletionRequest | ChatCompletionRequest],
        builder: type[ResponseBuilder],
        request: Request,
        body: bytes,
        arrival_seconds: float,
    ) -> Response:
        return await self.complete(model.parse(body), builder, request, arrival_seconds=arrival_seconds, size=len(body))

    async def complete(
        self,
        asked: CompletionRequest | ChatCompletionRequest,
        builder: type[ResponseBuilder],
        request: Request,
        *,
        arrival_seconds: float,
        size: int,
        **about: Any,
    ) -> Response:
        """Submit a completion request to the engine, and return the response that delivers the tokens.

        All routes that generate text call this method. Their own request becomes a chat completion request, and their
        builder writes the response in their own form.

        Args:
            size: bytes of the body. A thread encodes the prompts of a large one.
            about: further arguments of the builder.
        """
        context, processor = self._context, self._context.processor
        processor.check(asked)
        chat = await context.chat.plan(asked) if isinstance(asked, ChatCompletionRequest) else None
        constraint = asked.output_constraint if chat is None else chat.constraint
        grammar = await context.grammar_checker.grammar(constraint)
        plan = partial(processor.plan, asked, chat, arrival_seconds=arrival_seconds, grammar=grammar)
        choices = await call(plan, in_thread=size > MAX_INLINE_CHARACTERS)
        live = InflightRequest(
            choices=choices,
            arrival_seconds=arrival_seconds,
            terms=read_queue_policy(request, asked.timeout, context.settings),
        )
        response_builder = builder(
            asked,
            response_id=builder.id_prefix + choices[0].submit.uid,
            created=int(time.time()),
            model=context.served.model_name,
            tokenizer=context.served.tokenizer,
            chat=chat,
            **about,
        )
        delivery = CompletionStream if asked.stream else CompletionBody
        response = delivery(live, response_builder, metrics=context.metrics, finish=context.engine_client.finish)
        context.engine_client.submit(live)
        return response
