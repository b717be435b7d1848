"""Handlers of `/v1/completions` and `/v1/chat/completions`: from a request body to the engine and the response."""

import asyncio
import time

from fastapi import Request
from starlette.responses import Response

from service.api.context import ApiContext
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder, ResponseInfo, ResponseOptions
from service.api.streaming import CompletionBody, CompletionStream
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest, GenerationRequest
from service.requests.inflight import Choice, InflightRequest
from service.structured_output.compiler import GrammarChecker


class Completions:
    """Handlers of the completion routes."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._grammar_checker = GrammarChecker(
            context.served.tokenizer,
            max_waiting=context.processor.max_num_choices,
            observe=context.metrics.observe_structured,
        )

    async def complete_prompt(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._context.respond(request, self._respond_to_prompt)

    async def complete_chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._context.respond(request, self._respond_to_chat)

    def close(self) -> None:
        """End the grammar checker."""
        self._grammar_checker.close()

    async def _respond_to_prompt(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked, processor = CompletionRequest.parse(body), self._context.processor
        if len(body) > MAX_INLINE_CHARACTERS:
            choices = await asyncio.to_thread(processor.plan, asked, arrival_seconds=arrival_seconds)
        else:
            choices = processor.plan(asked, arrival_seconds=arrival_seconds)
        return await self._submit(asked, choices, CompletionBuilder, request)

    async def _respond_to_chat(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked, processor = ChatCompletionRequest.parse(body), self._context.processor
        processor.check(asked)
        token_ids = await self._context.chat.encode(
            asked.messages,
            add_generation_prompt=asked.value("add_generation_prompt"),
            more=asked.chat_template_kwargs,
        )
        choices = processor.plan(asked, token_ids, arrival_seconds=arrival_seconds)
        return await self._submit(asked, choices, ChatBuilder, request)

    async def _submit(
        self, asked: GenerationRequest, choices: list[Choice], builder: type[ResponseBuilder], request: Request
    ) -> Response:
        """Submit the choices to the engine and return the response that delivers their tokens."""
        context = self._context
        await self._grammar_checker.attach(asked.output_constraint, choices)
        live = InflightRequest(
            choices=choices,
            arrival_seconds=choices[0].submit.arrival_seconds,
            terms=context.queue_limits.terms(request, asked.timeout),
        )
        info = ResponseInfo(
            id=builder.id_prefix + choices[0].submit.uid,
            created=int(time.time()),
            model=context.served.model_name,
            response_options=ResponseOptions.of(asked),
        )
        context.admit(live)
        delivery = CompletionStream if asked.stream else CompletionBody
        return delivery(live, builder(info, context.served.tokenizer), metrics=context.metrics, close=context.close)
