"""Handlers of `/v1/completions` and `/v1/chat/completions`, and of their `/render` routes."""

import time
from dataclasses import asdict
from functools import partial
from typing import TypeAlias

from fastapi import Request
from starlette.responses import Response

from service.admission.controller import read_queue_policy
from service.api.context import ApiContext, call
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from service.api.streaming import CompletionBody, CompletionStream
from service.http.request_io import json_response
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest
from service.protocol.responses import RenderedPrompt
from service.requests.inflight import Choice, InflightRequest

Asked: TypeAlias = CompletionRequest | ChatCompletionRequest


class Completions:
    """Handlers that submit completion requests to the engine and return the streamed or whole responses."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def complete_prompt(self, request: Request) -> Response:
        return await self._context.respond(request, partial(self._respond, CompletionRequest, CompletionBuilder))

    async def complete_chat(self, request: Request) -> Response:
        return await self._context.respond(request, partial(self._respond, ChatCompletionRequest, ChatBuilder))

    async def render_prompt(self, request: Request) -> Response:
        """Handle `POST /v1/completions/render`. Return what would be computed for each prompt, and compute nothing."""
        return json_response(await self._render(CompletionRequest, CompletionBuilder, request))

    async def render_chat(self, request: Request) -> Response:
        """Handle `POST /v1/chat/completions/render`, as `render_prompt` for a conversation."""
        (rendered,) = await self._render(ChatCompletionRequest, ChatBuilder, request)
        return json_response(rendered)

    async def _render(
        self, model: type[Asked], builder: type[ResponseBuilder], request: Request
    ) -> list[RenderedPrompt]:
        body = await self._context.read_body(request)
        asked, choices = await self._plan(model, body, time.monotonic())
        return [
            RenderedPrompt(
                request_id=builder.id_prefix + choice.submit.uid,
                token_ids=choice.submit.prompt_token_ids,
                model=self._context.served.model_name,
                sampling_params={**asdict(choice.submit.params), "n": asked.value("n"), "seed": asked.seed},
            )
            for choice in choices[:: asked.num_samples]
        ]

    async def _plan(self, model: type[Asked], body: bytes, arrival_seconds: float) -> tuple[Asked, list[Choice]]:
        """Parse a request body and convert it into the choices to compute."""
        context, processor = self._context, self._context.processor
        asked = model.parse(body)
        processor.check(asked)
        conversation_ids = None
        if isinstance(asked, ChatCompletionRequest):
            conversation_ids = await context.chat.encode(
                asked.messages,
                add_generation_prompt=asked.adds_generation_prompt,
                continue_final_message=bool(asked.continue_final_message),
                more=asked.chat_template_kwargs,
            )
        grammar = await context.grammar_checker.grammar(asked.output_constraint)
        plan = partial(processor.plan, asked, conversation_ids, arrival_seconds=arrival_seconds, grammar=grammar)
        return asked, await call(plan, in_thread=len(body) > MAX_INLINE_CHARACTERS)

    async def _respond(
        self,
        model: type[Asked],
        builder: type[ResponseBuilder],
        request: Request,
        body: bytes,
        arrival_seconds: float,
    ) -> Response:
        """Parse a completion request, submit it to the engine, and return the response that delivers the tokens."""
        context = self._context
        asked, choices = await self._plan(model, body, arrival_seconds)
        live = InflightRequest(
            choices=choices,
            arrival_seconds=arrival_seconds,
            terms=read_queue_policy(request, asked.timeout, context.settings),
        )
        params, eos_token_ids = choices[0].submit.params, context.served.tokenizer.eos_token_ids
        response_builder = builder(
            asked,
            response_id=builder.id_prefix + choices[0].submit.uid,
            created=int(time.time()),
            model=context.served.model_name,
            tokenizer=context.served.tokenizer,
            visible_token_ids=frozenset(params.visible_token_ids) - params.hidden_token_ids(eos_token_ids),
        )
        delivery = CompletionStream if asked.stream else CompletionBody
        response = delivery(live, response_builder, metrics=context.metrics, finish=context.engine_client.finish)
        context.engine_client.submit(live)
        return response
