"""Route `/v1/embeddings`: vectors of texts, which the engine computes in the same batches as completions."""

import asyncio
import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request
from msgspec import Raw
from starlette.responses import Response
from starlette.types import Send

from model.sampling.params import SamplingParams
from service.admission.controller import QueuePolicy, read_queue_policy
from service.api.context import ApiContext, call
from service.api.streaming import Delivery
from service.config.settings import ServeSettings
from service.http.connection import ChunkedBody
from service.ipc.messages import Pooling, Submit, TokenDelta
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, write_vectors
from service.protocol.errors import InvalidRequest, Overloaded
from service.protocol.request_model import split_prompts
from service.protocol.responses import encode
from service.requests.inflight import Choice, InflightRequest

# Maximum prompt tokens per group. A larger group would delay other requests, or be rejected with 429 if some wait.
_GROUP_TOKENS = 16_384


class Embeddings:
    """Handler of the embeddings route. A request with many texts is submitted to the engine in groups."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def embed(self, request: Request, body: bytes, arrival_seconds: float) -> Response:
        asked = EmbeddingRequest.parse(body)
        terms = read_queue_policy(request, asked.timeout, self._context.settings)
        plan = partial(self._plan, asked, terms, arrival_seconds)
        groups = await call(plan, in_thread=len(body) > MAX_INLINE_CHARACTERS)
        response = EmbeddingBody(groups, asked, self._context)  # first: an exception then leaves no state
        self._context.engine_client.submit(groups[0])
        return response

    def _plan(self, asked: EmbeddingRequest, terms: QueuePolicy, arrival_seconds: float) -> list[InflightRequest]:
        """Return one choice per text of a request, in groups to submit one by one.

        Raises an `ApiError` for an unknown model or an invalid request.
        """
        settings = self._context.settings
        processor = self._context.processor.parsing_special(asked.parse_special)
        adapter = processor.adapter_key(asked.model)
        inputs = split_prompts(asked.input, "input")
        processor.check_num_prompts(len(inputs), "input")
        width, dimensions = self._context.served.manifest.config.hidden_size, asked.dimensions
        if dimensions is not None and dimensions > width:
            message = f"dimensions={dimensions} is over the {width} dimensions of this model; lower dimensions"
            raise InvalidRequest(message, param="dimensions")
        num_kept, room = asked.truncate_prompt_tokens, processor.max_context_length
        choices = []
        for index, text in enumerate(inputs):
            token_ids = processor.encode_prompt(text, "input", max_tokens=room, num_kept=num_kept)
            choices.append(embedding_choice(index, token_ids, arrival_seconds, settings, adapter=adapter))
        return split_request(choices, terms, arrival_seconds, max_group=settings.max_num_running)


class GroupedBody(Delivery):
    """ASGI response in JSON, sent when the engine has computed all groups of a request's sequences.

    The route handler submits the first group. This response submits each further group after the one before it.
    """

    media_type = "application/json"

    def __init__(self, groups: list[InflightRequest], context: ApiContext, *, model: str | None = None) -> None:
        super().__init__(groups[0], metrics=context.metrics, finish=context.engine_client.finish)
        self.model = model
        self._groups = groups
        self._context = context
        self._vectors: dict[int, bytes] = {}  # embeddings, by the choice's index
        num_tokens = sum(choice.num_prompt_tokens for choice in self.choices)
        self._usage = EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)

    @property
    def choices(self) -> list[Choice]:
        """Choices of all groups, including the follow-up groups added so far."""
        return [choice for group in self._groups for choice in group.choices]

    def _receive(self, choice: Choice, delta: TokenDelta) -> None:
        """Store the result of a sequence, which is its embedding. The sequence has one delta, which has the result."""
        assert delta.embedding is not None
        self._vectors[choice.index] = delta.embedding

    def _follow_up(self, group: InflightRequest) -> InflightRequest | None:
        """Return a further group to submit if the results so far are not enough, else None. Subclasses override it."""
        return None

    @abstractmethod
    def _encode(self) -> bytes:
        """Return the body of the response."""

    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None:
        for group in self._groups:
            if group is not self._request:
                await self._submit(group)
            num_missing = len(group.choices)
            while num_missing:
                for choice, delta in await group.next_deltas():
                    assert delta.finish is not None
                    self._receive(choice, delta)
                    num_missing -= 1
                    # The result is the whole response, so the latency objective counts the result as the first token.
                    self._first_token_seconds[choice.index] = time.monotonic()
                    self._observe_finish(choice, delta.finish)
            if (further := self._follow_up(group)) is not None:
                self._groups.append(further)
        # In a thread, because encoding is slow: a million numbers take 0.4 s.
        await self._send_body(send, await asyncio.to_thread(self._encode))

    async def _submit(self, group: InflightRequest) -> None:
        """Submit the request's next group of texts. While the server is overloaded, wait and retry.

        The group before it, whose results are complete, counts as unfinished until then, so that a shutdown waits for
        the whole request. Raises the `ApiError` of a request that fails meanwhile, such as ClientGone.
        """
        while True:
            if self._request.failure is not None:
                raise self._request.failure
            try:
                self._context.engine_client.submit(group)
                break
            except Overloaded as error:
                group.terms = replace(group.terms, is_retry=True)
                await asyncio.sleep(min(error.retry_after_seconds, 1.0))
        self._finish(self._request)
        self._request = group


class EmbeddingBody(GroupedBody):
    """ASGI response to an embeddings request: collects the vectors of all texts, and sends them in one JSON body."""

    def __init__(self, groups: list[InflightRequest], asked: EmbeddingRequest, context: ApiContext) -> None:
        super().__init__(groups, context, model=asked.model)
        self._asked = asked

    def _encode(self) -> bytes:
        vectors = [self._vectors[index] for index in range(len(self._vectors))]
        written = write_vectors(vectors, dimensions=self._asked.dimensions, as_text=self._asked.encoding_format)
        # Vectors are encoded one by one: encoding holds the GIL, which streams need meanwhile.
        data = [Raw(encode(Embedding(index=index, embedding=vector))) for index, vector in enumerate(written)]
        return encode(
            EmbeddingList(
                data=data,  # type: ignore[arg-type]
                model=self._context.processor.response_name(self.model),
                usage=self._usage,
            )
        )


def embedding_choice(
    index: int, token_ids: Sequence[int], arrival_seconds: float, settings: ServeSettings, *, adapter: str
) -> Choice:
    """Return a choice, with a new uid, that computes the embedding of a text's token ids."""
    submit = Submit(
        uid=uuid.uuid4().hex,
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(max_tokens=0),
        arrival_seconds=arrival_seconds,
        pooling=Pooling(settings.embedding_pooling),
        adapter=adapter,
    )
    return Choice(index=index, prompt_index=index, prompt_text="", submit=submit)


def split_request(
    choices: Sequence[Choice], terms: QueuePolicy, arrival_seconds: float, *, max_group: int
) -> list[InflightRequest]:
    """Split a request's choices into groups, see `group_choices`, each an inflight request to submit by itself.

    The first group has the queue timeout in `terms`, the later groups have none.
    """
    later_terms = replace(terms, timeout_seconds=float("inf"))
    return [
        InflightRequest(choices=group, arrival_seconds=arrival_seconds, terms=later_terms if number else terms)
        for number, group in enumerate(group_choices(choices, max_group))
    ]


def group_choices(choices: Sequence[Choice], max_group: int) -> list[list[Choice]]:
    """Split choices, in order, into groups of at most `max_group` choices.

    The prompts of a group have at most `_GROUP_TOKENS` tokens together; a longer prompt is a group of its own.
    """
    groups: list[list[Choice]] = []
    num_tokens = 0
    for choice in choices:
        num_tokens += choice.num_prompt_tokens
        if not groups or len(groups[-1]) == max_group or num_tokens > _GROUP_TOKENS:
            groups.append([])
            num_tokens = choice.num_prompt_tokens
        groups[-1].append(choice)
    return groups
