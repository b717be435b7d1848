"""Handlers of `/v1/completions` and `/v1/chat/completions`, and of their `/render` routes."""

import re
import time
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

from fastapi import Request
from starlette.responses import Response

from service.admission.controller import read_queue_policy
from service.api.context import ApiContext, call
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from service.api.streaming import CompletionBody, CompletionStream
from service.http.request_io import json_response
from service.preprocess.chat_renderer import ChatPlan
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest
from service.protocol.request_model import RequestModel
from service.protocol.responses import RenderedPrompt
from service.requests.inflight import Choice, InflightRequest

_MAX_NAMED_FIELDS = 32  # in the header x-ignored-fields
Asked: TypeAlias = CompletionRequest | ChatCompletionRequest


class Completions:
    """Handlers of completions and chat completions. `complete` also serves `/v1/messages` and `/v1/responses`."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def complete_prompt(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = CompletionRequest.parse(body)
        return await self.complete(asked, CompletionBuilder, request, arrival_seconds=arrival_seconds, size=len(body))

    async def complete_chat(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = ChatCompletionRequest.parse(body)
        return await self.complete(asked, ChatBuilder, request, arrival_seconds=arrival_seconds, size=len(body))

    async def render_prompt(self, request: Request) -> Response:
        """Handle `POST /v1/completions/render`. Return each prompt's token ids and parameters, and generate nothing."""
        return json_response(await self._render(CompletionRequest, CompletionBuilder, request))

    async def render_chat(self, request: Request) -> Response:
        """Handle `POST /v1/chat/completions/render`. Return the prompt's token ids and parameters, as one object."""
        (rendered,) = await self._render(ChatCompletionRequest, ChatBuilder, request)
        return json_response(rendered)

    async def _render(
        self, model: type[Asked], builder: type[ResponseBuilder], request: Request
    ) -> list[RenderedPrompt]:
        body = await self._context.read_body(request)
        asked = model.parse(body)
        choices, _ = await self._plan(asked, time.monotonic(), size=len(body))
        return [
            RenderedPrompt(
                request_id=builder.id_prefix + choice.submit.uid,
                token_ids=choice.submit.prompt_token_ids,
                model=self._context.processor.response_name(asked.model),
                sampling_params={**asdict(choice.submit.params), "n": asked.value("n"), "seed": asked.seed},
            )
            for choice in choices[:: asked.num_samples]
        ]

    async def _plan(self, asked: Asked, arrival_seconds: float, *, size: int) -> tuple[list[Choice], ChatPlan | None]:
        """Return the choices to submit for a request, and its `ChatPlan`, None for a request without a conversation.

        Raises an `ApiError` if the request is invalid, or if it cannot be prepared, as when too many requests wait for
        the chat template. `size`: bytes of the body.
        """
        context, processor = self._context, self._context.processor
        processor.check(asked)
        chat = await context.chat.plan(asked) if isinstance(asked, ChatCompletionRequest) else None
        constraint = asked.output_constraint if chat is None else chat.constraint
        grammar = await context.grammar_checker.grammar(constraint)
        plan = partial(processor.plan, asked, chat, arrival_seconds=arrival_seconds, grammar=grammar)
        return await call(plan, in_thread=size > MAX_INLINE_CHARACTERS), chat

    async def complete(
        self,
        asked: Asked,
        builder: type[ResponseBuilder],
        request: Request,
        *,
        arrival_seconds: float,
        size: int,
        **about: Any,
    ) -> Response:
        """Submit a completion request to the engine, and return the response that delivers the tokens.

        All routes that generate text call this method. Routes of other APIs convert their request to a chat completion
        request, and their builder writes the response in their form. Raises an `ApiError` for a rejected request.

        Args:
            size: bytes of the body. A thread encodes the prompts of a large body.
            about: arguments that the class `builder` takes beyond those of its base class `ResponseBuilder`.
        """
        context = self._context
        choices, chat = await self._plan(asked, arrival_seconds, size=size)
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
            model=context.processor.response_name(asked.model),
            tokenizer=context.served.tokenizer,
            visible_token_ids=frozenset(params.visible_token_ids) - params.hidden_token_ids(eos_token_ids),
            chat=chat,
            **about,
        )
        delivery = CompletionStream if asked.stream else CompletionBody
        response = delivery(live, response_builder, metrics=context.metrics, finish=context.engine_client.finish)
        self.report_ignored_fields(response, asked)
        context.engine_client.submit(live)
        return response

    def report_ignored_fields(self, response: Response, asked: RequestModel) -> None:
        """Name a request's ignored fields, if any, in the response header `x-ignored-fields`, and count them."""
        if ignored := asked.ignored_fields:
            shown = re.sub(r"[^!-~]", "?", ",".join(ignored[:_MAX_NAMED_FIELDS]))  # characters that a header can have
            response.raw_headers.append((b"x-ignored-fields", shown.encode("ascii")))
            for name in {name.partition("[")[0] for name in ignored}:
                self._context.metrics.count("ignored_fields", name)
