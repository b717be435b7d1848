"""Response builders: turn pieces of completions into the events and bodies of a route.

`service.api.streaming` makes pieces from the engine's deltas. `CompletionBuilder` writes the responses of
`/v1/completions`, `ChatBuilder` the responses of `/v1/chat/completions`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from model.tokenizer.interface import Tokenizer
from service.ipc.messages import Finish, FinishReason, TokenLogprob
from service.protocol.chat_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from service.protocol.completions import GenerationRequest
from service.protocol.logprobs import LogprobWriter, Wording, chat_logprobs, prompt_logprobs
from service.protocol.responses import (
    Completion,
    CompletionChoice,
    Logprobs,
    PromptLogprobs,
    Timings,
    Usage,
    encode_event,
    encode_text,
)
from service.requests.inflight import Choice

Event: TypeAlias = Completion | ChatCompletionChunk
Body: TypeAlias = Completion | ChatCompletion
_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
# Placeholder for the text in the event that serves as a template.
_ANY_TEXT = "\0text\0"


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
        """Return what a request asks for."""
        options = request.stream_options
        return cls(
            echo=request.echoes,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
            names_are_ids=bool(request.return_tokens_as_token_ids),
            usage=options is not None and bool(options.include_usage),
            running_usage=options is not None and bool(options.continuous_usage_stats),
            num_best=request.value("n") if request.chooses else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseInfo:
    """Fields shared by all events and bodies of a response, and what the client wants in the response."""

    id: str
    created: int
    model: str
    response_options: ResponseOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPiece:
    """New part of one choice.

    is_first: nothing of the choice has been sent, so the prompt's part of the response belongs to this piece.
    text: new text without an incomplete character or a possible stop string at its end.
    token_ids: new tokens.
    """

    choice: Choice
    is_first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: Finish | None

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Finish reason of the choice; None while the choice is unfinished."""
        return None if self.finish is None else _FINISH_REASONS[self.finish.reason]

    @property
    def stop_reason(self) -> str | int | None:
        """Stop string or token id that ended the choice, if any."""
        return None if self.finish is None else self.finish.stop_reason


class ResponseBuilder(ABC):
    """Response builder of one route for one request. It keeps state between the events of a stream."""

    id_prefix: ClassVar[str]

    def __init__(self, answer: ResponseInfo, tokenizer: Tokenizer) -> None:
        self.answer = answer
        self._response_options = response_options = answer.response_options
        self._wording = Wording(
            tokenizer=tokenizer, num_top=response_options.logprobs or 0, names_are_ids=response_options.names_are_ids
        )
        self._prompt_wording = Wording(tokenizer=tokenizer, num_top=response_options.prompt_logprobs or 0)
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def body(self, pieces: Sequence[TokenPiece], usage: Usage, timings: Timings) -> Body:
        """Return the whole response from one piece per choice."""

    @abstractmethod
    def opening(self, piece: TokenPiece) -> Event | None:
        """Return the event that must precede this piece in a stream, if any."""

    @abstractmethod
    def event(self, piece: TokenPiece) -> Event:
        """Return the event of this piece."""

    @abstractmethod
    def summary(self) -> Event:
        """Return an event without choices."""

    def plain_event(self, choice: Choice, text: str) -> bytes:
        """Return the encoded event of a piece that is only text, from a cached template, since most pieces are."""
        if (frame := self._frames.get(choice.index)) is None:
            piece = TokenPiece(choice=choice, is_first=False, text=_ANY_TEXT, token_ids=(), logprobs=(), finish=None)
            before, _, after = encode_event(self.event(piece)).rpartition(encode_text(_ANY_TEXT))
            frame = self._frames[choice.index] = before, after
        before, after = frame
        return before + encode_text(text) + after


class CompletionBuilder(ResponseBuilder):
    """`/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(self, answer: ResponseInfo, tokenizer: Tokenizer) -> None:
        super().__init__(answer, tokenizer)
        self._writers: dict[int, LogprobWriter] = {}

    def body(self, pieces: Sequence[TokenPiece], usage: Usage, timings: Timings) -> Completion:
        """See `ResponseBuilder`. Choices are numbered anew, since `best_of` returns some of the completions only."""
        completion = self._completion([self._choice(piece) for piece in pieces])
        for index, choice in enumerate(completion.choices):
            choice.index = index
        completion.usage, completion.timings = usage, timings
        return completion

    def opening(self, piece: TokenPiece) -> None:
        """See `ResponseBuilder`."""

    def event(self, piece: TokenPiece) -> Completion:
        """See `ResponseBuilder`."""
        return self._completion([self._choice(piece)])

    def summary(self) -> Completion:
        """See `ResponseBuilder`."""
        return self._completion([])

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        answer = self.answer
        return Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices)

    def _choice(self, piece: TokenPiece) -> CompletionChoice:
        response_options, choice = self._response_options, piece.choice
        built = CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=None if response_options.logprobs is None else self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if response_options.token_ids:
            built.token_ids = piece.token_ids
        if piece.is_first:
            if response_options.echo:
                built.text = choice.prompt_text + piece.text
            if response_options.token_ids:
                built.prompt_token_ids = choice.submit.prompt_token_ids
            if response_options.prompt_logprobs is not None:
                built.prompt_logprobs = prompt_logprobs(choice.prompt_logprobs, self._prompt_wording)
        return built

    def _logprobs(self, piece: TokenPiece) -> Logprobs:
        index = piece.choice.index
        if index not in self._writers:
            self._writers[index] = LogprobWriter(self._wording)
        prompt = piece.choice.prompt_logprobs if self._response_options.echo and piece.is_first else ()
        return self._writers[index].write(piece.logprobs, prompt=prompt)


class ChatBuilder(ResponseBuilder):
    """`/v1/chat/completions`. All choices share one prompt, and the first choice has the prompt's logprobs."""

    id_prefix: ClassVar[str] = "chatcmpl-"

    def __init__(self, answer: ResponseInfo, tokenizer: Tokenizer) -> None:
        super().__init__(answer, tokenizer)
        self._has_opened = False

    def body(self, pieces: Sequence[TokenPiece], usage: Usage, timings: Timings) -> ChatCompletion:
        """See `ResponseBuilder`."""
        answer, first = self.answer, pieces[0].choice
        completion = ChatCompletion(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage,
            timings=timings,
        )
        if self._response_options.token_ids:
            completion.prompt_token_ids = first.submit.prompt_token_ids
        if self._response_options.prompt_logprobs is not None:
            completion.prompt_logprobs = self._prompt_logprobs(first)
        return completion

    def opening(self, piece: TokenPiece) -> ChatCompletionChunk | None:
        """See `ResponseBuilder`. The first event of a choice has the role and no text, as OpenAI's has."""
        if not piece.is_first:
            return None
        choice = piece.choice
        chunk = self._chunk(ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content="")))
        if self._response_options.token_ids and not self._has_opened:
            chunk.prompt_token_ids = choice.submit.prompt_token_ids
        if self._response_options.prompt_logprobs is not None and choice.index == 0:
            chunk.prompt_logprobs = self._prompt_logprobs(choice)
        self._has_opened = True
        return chunk

    def event(self, piece: TokenPiece) -> ChatCompletionChunk:
        """See `ResponseBuilder`."""
        built = ChatChunkChoice(
            index=piece.choice.index,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            logprobs=self._logprobs(piece) if piece.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._response_options.token_ids:
            built.token_ids = piece.token_ids
        return self._chunk(built)

    def summary(self) -> ChatCompletionChunk:
        """See `ResponseBuilder`."""
        return self._chunk()

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        answer = self.answer
        return ChatCompletionChunk(id=answer.id, created=answer.created, model=answer.model, choices=list(choices))

    def _choice(self, piece: TokenPiece) -> ChatChoice:
        built = ChatChoice(
            index=piece.choice.index,
            message=ChatMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._response_options.token_ids:
            built.token_ids = piece.token_ids
        return built

    def _logprobs(self, piece: TokenPiece) -> ChatLogprobs | None:
        return None if self._response_options.logprobs is None else chat_logprobs(piece.logprobs, self._wording)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs:
        return prompt_logprobs(choice.prompt_logprobs, self._prompt_wording)
