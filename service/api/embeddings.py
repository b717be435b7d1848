"""Route `/v1/embeddings`: texts as vectors, pooled by the engine in the same steps as completions.

A request with many texts is submitted in groups, so that it occupies no more capacity than a few completions. After the
first group has been admitted, later groups wait for capacity instead of being rejected.
"""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request
from msgspec import Raw
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from model.sampling.params import SamplingParams
from service.admission.queue_policy import QueuePolicy, queue_limits
from service.api.request_intake import Intake
from service.config.settings import ServeSettings
from service.http.request_io import read_body
from service.ipc.messages import FinishReason, Pooling, Submit
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS, RequestProcessor
from service.preprocess.truncation import Truncation
from service.protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, write_vectors
from service.protocol.errors import ApiError, ClientGone, ContextLengthExceeded, InvalidRequest, Overloaded
from service.protocol.responses import encode
from service.requests.inflight import Choice, InflightRequest

# Prompt tokens per group. A larger group would delay other requests, and be rejected with 429 if requests wait already.
_GROUP_TOKENS = 16_384
# Responses with more numbers are encoded in a thread: a million numbers take 0.4 s.
_MANY_NUMBERS = 20_000


class Embeddings:
    """Handler of the route.

    Args:
        processor: checks the model's name and encodes texts.
        width: dimensions of a vector.
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        intake: Intake,
        processor: RequestProcessor,
        width: int,
    ) -> None:
        self._limits = queue_limits(settings)
        self._pooling = Pooling(settings.embedding_pooling)
        self._max_group = settings.max_num_running
        self._max_body_bytes = settings.max_body_size
        self._intake = intake
        self._processor = processor
        self._width = width

    async def embeddings(self, request: Request) -> Response:
        """`POST /v1/embeddings`."""
        arrival_seconds = time.monotonic()
        body = await read_body(request, max_bytes=self._max_body_bytes)
        return await self._intake.response_store.answer(
            request, body, partial(self._embed, request, body, arrival_seconds)
        )

    async def _embed(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        self._intake.reject_when_draining()
        asked = EmbeddingRequest.parse(body)
        terms = self._limits.terms(request, asked.timeout)
        if len(body) > MAX_INLINE_CHARACTERS:
            groups = await asyncio.to_thread(self._plan, asked, terms, arrival_seconds)
        else:
            groups = self._plan(asked, terms, arrival_seconds)
        self._intake.admit(groups[0])
        model = self._processor.model_name
        return EmbeddingBody(groups, asked, model=model, intake=self._intake)

    def _plan(self, asked: EmbeddingRequest, terms: QueuePolicy, arrival_seconds: float) -> list[InflightRequest]:
        """Return the texts as sequences, in groups. Only the first group has the request's timeout.

        Raises:
            ModelNotFound: the request names another model.
            InvalidRequest: a text, a token id or a field is invalid.
        """
        self._processor.check_model(asked.model)
        inputs = asked.inputs
        self._processor.check_num_prompts(len(inputs), "input")
        if asked.dimensions is not None and asked.dimensions > self._width:
            raise InvalidRequest(
                f"dimensions={asked.dimensions} is over the {self._width} of this model", param="dimensions"
            )
        choices = [
            Choice(index=index, prompt_index=index, prompt_text="", submit=self._submit(ids, arrival_seconds))
            for index, ids in enumerate(self._token_ids(asked, text) for text in inputs)
        ]
        later = replace(terms, timeout_seconds=float("inf"))
        return [
            InflightRequest(
                choices=group,
                arrival_seconds=arrival_seconds,
                terms=later if number else terms,
                last_sent_seconds=float("inf"),
            )
            for number, group in enumerate(grouped(choices, self._max_group))
        ]

    def _submit(self, token_ids: list[int], arrival_seconds: float) -> Submit:
        return Submit(
            uid=uuid.uuid4().hex,
            attempt=0,
            prompt_token_ids=tuple(token_ids),
            prior_token_ids=(),
            params=SamplingParams(max_tokens=0),
            arrival_seconds=arrival_seconds,
            deadline_seconds=None,
            pooling=self._pooling,
        )

    def _token_ids(self, asked: EmbeddingRequest, text: str | list[int]) -> list[int]:
        """Return a text's token ids with the begin-of-text token, truncated if the request asks for it."""
        room, kept = self._processor.max_context_length, asked.truncate_prompt_tokens
        num_special_tokens = 0
        if isinstance(text, str):
            # A text that cannot fit, however it is tokenized, is rejected before it is tokenized.
            if kept is None and (at_least := self._processor.least_tokens(text)) > room:
                raise self._too_long(f"at least {at_least}")
            try:
                token_ids = self._processor.encode(text)
            except InvalidRequest as error:  # the error names the field "prompt"
                raise InvalidRequest(error.message, param="input") from None
            num_special_tokens = int(self._processor.tokenizer.bos_token_id is not None)
        else:
            self._processor.check_ids(text, "input")
            token_ids = text
        if kept is not None:
            truncation = Truncation(num_kept=None if kept < 0 else kept, keeps_end=True)
            token_ids = truncation.cut(token_ids, room=room, num_special_tokens=num_special_tokens)
        if len(token_ids) > room:
            raise self._too_long(str(len(token_ids)))
        return token_ids

    def _too_long(self, num_tokens: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"this model's maximum context length is {self._processor.max_context_length} tokens, "
            f"but a text has {num_tokens}; shorten it, or set truncate_prompt_tokens",
            param="input",
        )


class EmbeddingBody(Response):
    """JSON response, sent when every text is pooled. The first group has been submitted already."""

    media_type = "application/json"

    def __init__(
        self,
        groups: list[InflightRequest],
        asked: EmbeddingRequest,
        *,
        model: str,
        intake: Intake,
    ) -> None:
        # Response.__init__ is not called: it would set Content-Length, and the body is unknown yet.
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._groups = groups
        self._current = groups[0]
        self._asked = asked
        self._model = model
        self._intake = intake
        self._vectors: dict[int, bytes] = {}
        self._has_client = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. A client that disconnects ends the request at once.

        Raises:
            ApiError: the request failed.
        """
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._collect()
            for group in self._groups[1:]:
                await self._go_on(group)
                await self._collect()
            many = len(self._vectors) * len(self._vectors[0]) > 4 * _MANY_NUMBERS
            body = await asyncio.to_thread(self._body) if many else self._body()
        except ClientGone:
            has_started = any(choice.has_started for choice in self._current.choices)
            self._intake.metrics.count_cancellation("running" if has_started else "waiting")
            return
        finally:
            watcher.cancel()
            self._intake.close(self._current)
        headers = [*self.raw_headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_client = False
        self._current.fail(ClientGone("the client closed the connection"))

    async def _collect(self) -> None:
        """Wait for the vectors of the current group."""
        request, num_missing = self._current, len(self._current.choices)
        try:
            while num_missing:
                for choice, delta in await request.next_deltas():
                    assert delta.finish is not None
                    assert delta.embedding is not None
                    self._vectors[choice.index] = delta.embedding
                    num_missing -= 1
                    self._observe(request, choice)
        except ClientGone:
            raise
        except ApiError:
            for choice in request.choices:
                if choice.finish is not None and choice.finish.reason is FinishReason.ERROR:
                    self._observe(request, choice)
            raise

    async def _go_on(self, group: InflightRequest) -> None:
        """Submit the next group as soon as there is capacity.

        The finished group stays open until then, so that a drain waits for the request.
        """
        while True:
            if not self._has_client:
                raise ClientGone("the client closed the connection")
            try:
                self._intake.admit(group)
                break
            except Overloaded as error:
                await asyncio.sleep(min(error.retry_after_seconds, 1.0))
        self._intake.close(self._current)
        self._current = group

    def _observe(self, request: InflightRequest, choice: Choice) -> None:
        assert choice.finish is not None
        seconds = time.monotonic() - request.arrival_seconds
        # The vector is the whole response, so it counts as the first token in the latency objective.
        self._intake.metrics.observe_finish(choice.finish, e2e_seconds=seconds, ttft_seconds=seconds, max_tokens=0)

    def _body(self) -> bytes:
        vectors = [self._vectors[index] for index in range(len(self._vectors))]
        written = write_vectors(vectors, dimensions=self._asked.dimensions, as_text=self._asked.encoding_format)
        num_tokens = sum(choice.num_prompt_tokens for group in self._groups for choice in group.choices)
        # Vectors are encoded one by one: encoding holds the GIL, which streams need meanwhile.
        data = [Raw(encode(Embedding(index=index, embedding=vector))) for index, vector in enumerate(written)]
        answer = EmbeddingList(
            data=data,  # type: ignore[arg-type]
            model=self._model,
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
        return encode(answer)


def grouped(choices: Sequence[Choice], max_group: int) -> list[list[Choice]]:
    """Group neighbouring choices: at most `max_group` each, and `_GROUP_TOKENS` tokens in a group of several."""
    groups: list[list[Choice]] = []
    num_tokens = 0
    for choice in choices:
        num_tokens += choice.num_prompt_tokens
        if not groups or len(groups[-1]) == max_group or num_tokens > _GROUP_TOKENS:
            groups.append([])
            num_tokens = choice.num_prompt_tokens
        groups[-1].append(choice)
    return groups
