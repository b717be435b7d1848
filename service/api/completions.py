"""Routes `/v1/completions` and `/v1/chat/completions`: parse a request, submit its sequences, return its response."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import Request
from starlette.responses import Response

from service.admission.queue_policy import queue_limits
from service.api.request_intake import Intake
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder, ResponseInfo, ResponseOptions
from service.api.streaming import CompletionBody, CompletionStream
from service.config.settings import ServeSettings
from service.http.request_io import read_body
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS, RequestProcessor
from service.preprocess.served_model import ServedModel
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest, GenerationRequest
from service.requests.inflight import Choice, InflightRequest
from service.structured_output.compiler import GrammarChecker

_Read = Callable[[Request, bytes, float], Awaitable[Response]]


class Completions:
    """Handlers of the two routes.

    Args:
        processor: turns requests into sequences.
        chat: encodes conversations as prompts.
    """

    def __init__(
        self,
        settings: ServeSettings,
        served: ServedModel,
        *,
        intake: Intake,
        processor: RequestProcessor,
        chat: ChatPrompts,
    ) -> None:
        self._model_name = served.model_name
        self._tokenizer = served.tokenizer
        self._max_body_bytes = settings.max_body_size
        self._limits = queue_limits(settings)
        self._processor = processor
        self._chat = chat
        self._grammar_checker = GrammarChecker(
            served.tokenizer, max_waiting=processor.max_num_choices, observe=intake.metrics.observe_structured
        )
        self._intake = intake

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, self._completion)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, self._conversation)

    def close(self) -> None:
        """End the grammar checker."""
        self._grammar_checker.close()

    async def _answer(self, request: Request, read: _Read) -> Response:
        arrival_seconds = time.monotonic()
        body = await read_body(request, max_bytes=self._max_body_bytes)
        return await self._intake.response_store.answer(request, body, partial(read, request, body, arrival_seconds))

    async def _completion(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        self._intake.reject_when_draining()
        asked = CompletionRequest.parse(body)
        if len(body) > MAX_INLINE_CHARACTERS:
            choices = await asyncio.to_thread(self._processor.plan, asked, arrival_seconds=arrival_seconds)
        else:
            choices = self._processor.plan(asked, arrival_seconds=arrival_seconds)
        return await self._submit(asked, choices, CompletionBuilder, request)

    async def _conversation(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        self._intake.reject_when_draining()
        asked = ChatCompletionRequest.parse(body)
        self._processor.check(asked)
        token_ids = await self._chat.encode(
            asked.messages,
            add_generation_prompt=asked.value("add_generation_prompt"),
            more=asked.chat_template_kwargs,
        )
        choices = self._processor.plan_chat(asked, token_ids, arrival_seconds=arrival_seconds)
        return await self._submit(asked, choices, ChatBuilder, request)

    async def _submit(
        self, asked: GenerationRequest, choices: list[Choice], builder: type[ResponseBuilder], request: Request
    ) -> Response:
        """Submit the choices to the engine and return the response that will deliver them."""
        await self._grammar_checker.attach(asked.output_constraint, choices)
        live = InflightRequest(
            choices=choices,
            arrival_seconds=choices[0].submit.arrival_seconds,
            terms=self._limits.terms(request, asked.timeout),
        )
        answer = ResponseInfo(
            id=builder.id_prefix + choices[0].submit.uid,
            created=int(time.time()),
            model=self._model_name,
            response_options=ResponseOptions.of(asked),
        )
        self._intake.admit(live)
        delivery = CompletionStream if asked.stream else CompletionBody
        words, intake = builder(answer, self._tokenizer), self._intake
        return delivery(live, words, metrics=intake.metrics, close=intake.close)
