"""Routes `/v1/completions` and `/v1/chat/completions`: parse a request, submit its sequences, return its response."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import Request
from starlette.responses import Response

from service.chat import ChatPrompts
from service.chat_schemas import ChatCompletionRequest
from service.delivery import CompletionBody, CompletionStream
from service.dialects import Answer, Chat, Dialect, Text, Wants
from service.intake import Intake
from service.live_request import Choice, LiveRequest
from service.plan import LONG_TEXT, Planner
from service.queue_terms import queue_limits
from service.requests import read_body
from service.schemas import CompletionRequest, GenerationRequest
from service.serving import Serving
from service.settings import ServeSettings
from service.structured.checker import GrammarChecker

_Read = Callable[[Request, bytes, float], Awaitable[Response]]


class Completions:
    """Handlers of the two routes.

    Args:
        planner: turns requests into sequences.
        chat: encodes conversations as prompts.
    """

    def __init__(
        self,
        settings: ServeSettings,
        serving: Serving,
        *,
        intake: Intake,
        planner: Planner,
        chat: ChatPrompts,
    ) -> None:
        self._model_name = serving.model_name
        self._tokenizer = serving.tokenizer
        self._max_body_bytes = settings.max_body_size
        self._limits = queue_limits(settings)
        self._planner = planner
        self._chat = chat
        self._grammar_checker = GrammarChecker(
            serving.tokenizer, max_waiting=planner.max_num_choices, observe=intake.metrics.observe_structured
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
        return await self._intake.recordings.answer(request, body, partial(read, request, body, arrival_seconds))

    async def _completion(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        self._intake.refuse_when_draining()
        asked = CompletionRequest.parse(body)
        if len(body) > LONG_TEXT:
            choices = await asyncio.to_thread(self._planner.plan, asked, arrival_seconds=arrival_seconds)
        else:
            choices = self._planner.plan(asked, arrival_seconds=arrival_seconds)
        return await self._submit(asked, choices, Text, request)

    async def _conversation(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        self._intake.refuse_when_draining()
        asked = ChatCompletionRequest.parse(body)
        self._planner.check(asked)
        token_ids = await self._chat.encode(
            asked.messages,
            add_generation_prompt=asked.value("add_generation_prompt"),
            more=asked.chat_template_kwargs,
        )
        choices = self._planner.plan_chat(asked, token_ids, arrival_seconds=arrival_seconds)
        return await self._submit(asked, choices, Chat, request)

    async def _submit(
        self, asked: GenerationRequest, choices: list[Choice], dialect: type[Dialect], request: Request
    ) -> Response:
        """Submit the choices to the engine and return the response that will deliver them."""
        await self._grammar_checker.attach(asked.wanted_output, choices)
        live = LiveRequest(
            choices=choices,
            arrival_seconds=choices[0].submit.arrival_seconds,
            terms=self._limits.terms(request, asked.timeout),
        )
        answer = Answer(
            id=dialect.id_prefix + choices[0].submit.uid,
            created=int(time.time()),
            model=self._model_name,
            wants=Wants.of(asked),
        )
        self._intake.admit(live)
        delivery = CompletionStream if asked.stream else CompletionBody
        words, intake = dialect(answer, self._tokenizer), self._intake
        return delivery(live, words, metrics=intake.metrics, close=intake.close)
