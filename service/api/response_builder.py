"""Response builders: turn token deltas into the events and bodies of a route.

`CompletionBuilder` writes the responses of `/v1/completions`, `ChatBuilder` the responses of `/v1/chat/completions`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from model.tokenizer.interface import Tokenizer
from service.ipc.messages import Finish, FinishReason, TokenDelta
from service.protocol.completions import GenerationRequest
from service.protocol.logprobs import LogprobFormat, LogprobWriter, chat_logprobs, prompt_logprobs
from service.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    PromptLogprobs,
    Timings,
    Usage,
    encode_event,
)
from service.requests.inflight import Choice, Deltas

Event: TypeAlias = Completion | ChatCompletionChunk
Body: TypeAlias = Completion | ChatCompletion
# Delta of the event that serves as a template for events that differ only in their text.
_ANY_DELTA = TokenDelta(
    uid="", attempt=0, index=0, token_ids=(), text="\0text\0", logprobs=None, prompt_logprobs=None, finish=None
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions:
    """Parts of a response that the client requested beside the text.

    echo: the prompt's text, with its logprobs where logprobs are requested.
    logprobs, prompt_logprobs: number of alternatives to each token; None for no logprobs.
    token_ids: token ids of the completion and the prompt.
    names_are_ids: `logprobs` names tokens by their ids.
    usage: token counts in a last event of a stream.
    running_usage: token counts in all other events of a stream.
    num_best: number of completions to return for each prompt, the best ones; None for all completions.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    names_are_ids: bool = False
    usage: bool = False
    running_usage: bool = False
    num_best: int | None = None

    @classmethod
    def of(cls, request: GenerationRequest) -> "ResponseOptions":
        """Return the response options that a request sets."""
        options = request.stream_options
        return cls(
            echo=request.echoes,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
            names_are_ids=bool(request.return_tokens_as_token_ids),
            usage=options is not None and bool(options.include_usage),
            running_usage=options is not None and bool(options.continuous_usage_stats),
            num_best=request.value("n") if request.is_ranked else None,
        )


class ResponseBuilder(ABC):
    """Response builder of one route for one request. It keeps state between the events of a stream.

    Args:
        response_id, created, model: fields of every event and body.
    """

    id_prefix: ClassVar[str]

    def __init__(
        self, *, response_id: str, created: int, model: str, options: ResponseOptions, tokenizer: Tokenizer
    ) -> None:
        self.options = options
        self._id = response_id
        self._created = created
        self._model = model
        self._logprob_format = LogprobFormat(
            tokenizer=tokenizer, num_top=options.logprobs or 0, names_are_ids=options.names_are_ids
        )
        self._prompt_format = LogprobFormat(tokenizer=tokenizer, num_top=options.prompt_logprobs or 0)
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def body(self, wholes: Deltas, usage: Usage, timings: Timings) -> Body:
        """Return the whole response from one delta per choice."""

    @abstractmethod
    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return the events of a delta. The prompt's part of the response belongs to a choice's first event."""

    @abstractmethod
    def summary(self) -> Event:
        """Return an event without choices."""

    def plain_event(self, choice: Choice, text: str) -> bytes:
        """Return the encoded event of a delta that is only text, from a cached template, since most deltas are."""
        if (frame := self._frames.get(choice.index)) is None:
            (event,) = self.events(choice, _ANY_DELTA, is_first=False)
            before, _, after = encode_event(event).rpartition(encode_event(_ANY_DELTA.text, b"", b""))
            frame = self._frames[choice.index] = before, after
        return encode_event(text, *frame)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs:
        return prompt_logprobs(choice.prompt_logprobs, self._prompt_format)


class CompletionBuilder(ResponseBuilder):
    """Response builder of `/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._writers: dict[int, LogprobWriter] = {}

    def body(self, wholes: Deltas, usage: Usage, timings: Timings) -> Completion:
        """Return the body of whole completions, numbered anew because `best_of` returns only some of them."""
        choices: list[CompletionChoice] = []
        for index, (choice, delta) in enumerate(wholes):
            (event,) = self.events(choice, delta, is_first=True)
            assert isinstance(event, Completion)
            event.choices[0].index = index
            choices += event.choices
        return Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, timings=timings
        )

    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return one event with the delta's text, and the requested logprobs and token ids."""
        options = self.options
        built = CompletionChoice(
            index=choice.index,
            text=delta.text,
            logprobs=None,
            finish_reason=_finish_reason(delta.finish),
            stop_reason=None if delta.finish is None else delta.finish.stop_reason,
        )
        if options.logprobs is not None:
            if choice.index not in self._writers:
                self._writers[choice.index] = LogprobWriter(self._logprob_format)
            prompt = choice.prompt_logprobs if options.echo and is_first else ()
            built.logprobs = self._writers[choice.index].write(delta.logprobs or (), prompt=prompt)
        if options.token_ids:
            built.token_ids = delta.token_ids
        if is_first:
            if options.echo:
                built.text = choice.prompt_text + delta.text
            if options.token_ids:
                built.prompt_token_ids = choice.submit.prompt_token_ids
            if options.prompt_logprobs is not None:
                built.prompt_logprobs = self._prompt_logprobs(choice)
        return [Completion(id=self._id, created=self._created, model=self._model, choices=[built])]

    def summary(self) -> Completion:
        """Return an event without choices."""
        return Completion(id=self._id, created=self._created, model=self._model, choices=[])


class ChatBuilder(ResponseBuilder):
    """Response builder of `/v1/chat/completions`. The first choice has the logprobs of the one prompt."""

    id_prefix: ClassVar[str] = "chatcmpl-"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._has_opened = False

    def body(self, wholes: Deltas, usage: Usage, timings: Timings) -> ChatCompletion:
        """Return the body of whole messages."""
        first, _ = wholes[0]
        choices = [
            ChatChoice(
                index=choice.index,
                message=ChatMessage(content=delta.text),
                logprobs=self._logprobs(delta),
                finish_reason=_finish_reason(delta.finish),
                stop_reason=None if delta.finish is None else delta.finish.stop_reason,
            )
            for choice, delta in wholes
        ]
        completion = ChatCompletion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, timings=timings
        )
        if self.options.token_ids:
            completion.prompt_token_ids = first.submit.prompt_token_ids
            for built, (_, delta) in zip(choices, wholes, strict=True):
                built.token_ids = delta.token_ids
        if self.options.prompt_logprobs is not None:
            completion.prompt_logprobs = self._prompt_logprobs(first)
        return completion

    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return the event of a delta. As in OpenAI's streams, an event with the role precedes a choice's first."""
        events: list[Event] = []
        if is_first:
            role = ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))
            opening = ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[role])
            if self.options.token_ids and not self._has_opened:
                opening.prompt_token_ids = choice.submit.prompt_token_ids
            if self.options.prompt_logprobs is not None and choice.index == 0:
                opening.prompt_logprobs = self._prompt_logprobs(choice)
            self._has_opened = True
            events.append(opening)
        built = ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta) if delta.logprobs else None,
            finish_reason=_finish_reason(delta.finish),
            stop_reason=None if delta.finish is None else delta.finish.stop_reason,
        )
        if self.options.token_ids:
            built.token_ids = delta.token_ids
        events.append(ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[built]))
        return events

    def summary(self) -> ChatCompletionChunk:
        """Return an event without choices."""
        return ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[])

    def _logprobs(self, delta: TokenDelta) -> ChatLogprobs | None:
        return None if self.options.logprobs is None else chat_logprobs(delta.logprobs or (), self._logprob_format)


def _finish_reason(finish: Finish | None) -> Literal["stop", "length"] | None:
    if finish is None:
        return None
    return "stop" if finish.reason is FinishReason.STOP else "length"
