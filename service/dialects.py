"""How an answer is worded: the same pieces of completions as the events and bodies of one route or the other.

The engine completes prompts, and delivery makes pieces of what it tells. `Text` says them in the words of
`/v1/completions`, `Chat` in those of `/v1/chat/completions`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from model.tokenizer.interface import Tokenizer
from service.chat_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from service.live_request import Choice
from service.logprobs import LogprobWriter, Wording, chat_logprobs, prompt_logprobs
from service.messages import Finish, FinishReason, TokenLogprob
from service.responses import (
    Completion,
    CompletionChoice,
    Logprobs,
    PromptLogprobs,
    Timings,
    Usage,
    encode_event,
    encode_text,
)
from service.schemas import GenerationRequest

Event: TypeAlias = Completion | ChatCompletionChunk
Body: TypeAlias = Completion | ChatCompletion
_FINISH_REASONS: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
# Where the text is in an event.
_ANY_TEXT = "\0text\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """What a client wants beside the text.

    echo: the prompt's text, and its log-probabilities where there are some.
    logprobs, prompt_logprobs: alternatives to each token, None for no log-probabilities.
    names_are_ids: tokens are named by their ids in `logprobs`.
    usage: in a last event of a stream; running_usage: in all the others.
    num_best: how many of each prompt's completions are told, the best ones; None for all of them.
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
    def of(cls, request: GenerationRequest) -> "Wants":
        """What this request says."""
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
class Answer:
    """What is the same in everything that is sent for a request, and what the client wants of it."""

    id: str
    created: int
    model: str
    wants: Wants


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What is new of one choice: `text` that is safe to show, and the tokens that came.

    is_first: nothing of the choice has been told, and its prompt is part of this piece.
    """

    choice: Choice
    is_first: bool
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    finish: Finish | None

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the choice ended, where it has."""
        return None if self.finish is None else _FINISH_REASONS[self.finish.reason]

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token id that ended it, where one did."""
        return None if self.finish is None else self.finish.stop_reason


class Dialect(ABC):
    """The words of one route, for one request: it knows what has been said."""

    id_prefix: ClassVar[str]

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self.answer = answer
        self._wants = wants = answer.wants
        self._wording = Wording(tokenizer=tokenizer, num_top=wants.logprobs or 0, names_are_ids=wants.names_are_ids)
        self._prompt_wording = Wording(tokenizer=tokenizer, num_top=wants.prompt_logprobs or 0)
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def body(self, pieces: Sequence[Piece], usage: Usage, timings: Timings) -> Body:
        """The whole answer: one piece a choice."""

    @abstractmethod
    def opening(self, piece: Piece) -> Event | None:
        """The event of a stream that must come before this piece, if one must."""

    @abstractmethod
    def event(self, piece: Piece) -> Event:
        """The event that says this piece."""

    @abstractmethod
    def summary(self) -> Event:
        """An event without choices."""

    def plain_event(self, choice: Choice, text: str) -> bytes:
        """The bytes of the event of a piece that is text and nothing else, as most are: the rest is always the same."""
        if (frame := self._frames.get(choice.index)) is None:
            piece = Piece(choice=choice, is_first=False, text=_ANY_TEXT, token_ids=(), logprobs=(), finish=None)
            before, _, after = encode_event(self.event(piece)).rpartition(encode_text(_ANY_TEXT))
            frame = self._frames[choice.index] = before, after
        before, after = frame
        return before + encode_text(text) + after


class Text(Dialect):
    """`/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl-"

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        super().__init__(answer, tokenizer)
        self._writers: dict[int, LogprobWriter] = {}

    def body(self, pieces: Sequence[Piece], usage: Usage, timings: Timings) -> Completion:
        """See `Dialect`. Of completions that were chosen from more, the index is their place among the chosen."""
        completion = self._completion([self._choice(piece) for piece in pieces])
        for index, choice in enumerate(completion.choices):
            choice.index = index
        completion.usage, completion.timings = usage, timings
        return completion

    def opening(self, piece: Piece) -> None:
        """See `Dialect`."""

    def event(self, piece: Piece) -> Completion:
        """See `Dialect`."""
        return self._completion([self._choice(piece)])

    def summary(self) -> Completion:
        """See `Dialect`."""
        return self._completion([])

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        answer = self.answer
        return Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices)

    def _choice(self, piece: Piece) -> CompletionChoice:
        wants, choice = self._wants, piece.choice
        told = CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=None if wants.logprobs is None else self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if wants.token_ids:
            told.token_ids = piece.token_ids
        if piece.is_first:
            if wants.echo:
                told.text = choice.prompt_text + piece.text
            if wants.token_ids:
                told.prompt_token_ids = choice.submit.prompt_token_ids
            if wants.prompt_logprobs is not None:
                told.prompt_logprobs = prompt_logprobs(choice.prompt_logprobs, self._prompt_wording)
        return told

    def _logprobs(self, piece: Piece) -> Logprobs:
        index = piece.choice.index
        if index not in self._writers:
            self._writers[index] = LogprobWriter(self._wording)
        prompt = piece.choice.prompt_logprobs if self._wants.echo and piece.is_first else ()
        return self._writers[index].write(piece.logprobs, prompt=prompt)


class Chat(Dialect):
    """`/v1/chat/completions`: the assistant's messages. All answer one prompt, and the first has its scores."""

    id_prefix: ClassVar[str] = "chatcmpl-"

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        super().__init__(answer, tokenizer)
        self._has_opened = False

    def body(self, pieces: Sequence[Piece], usage: Usage, timings: Timings) -> ChatCompletion:
        """See `Dialect`."""
        answer, first = self.answer, pieces[0].choice
        completion = ChatCompletion(
            id=answer.id,
            created=answer.created,
            model=answer.model,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage,
            timings=timings,
        )
        if self._wants.token_ids:
            completion.prompt_token_ids = first.submit.prompt_token_ids
        if self._wants.prompt_logprobs is not None:
            completion.prompt_logprobs = self._prompt_logprobs(first)
        return completion

    def opening(self, piece: Piece) -> ChatCompletionChunk | None:
        """See `Dialect`. A choice's first event says who speaks, and no text yet, as OpenAI's does."""
        if not piece.is_first:
            return None
        choice = piece.choice
        chunk = self._chunk(ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content="")))
        if self._wants.token_ids and not self._has_opened:
            chunk.prompt_token_ids = choice.submit.prompt_token_ids
        if self._wants.prompt_logprobs is not None and choice.index == 0:
            chunk.prompt_logprobs = self._prompt_logprobs(choice)
        self._has_opened = True
        return chunk

    def event(self, piece: Piece) -> ChatCompletionChunk:
        """See `Dialect`."""
        told = ChatChunkChoice(
            index=piece.choice.index,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            logprobs=self._logprobs(piece) if piece.logprobs else None,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._wants.token_ids:
            told.token_ids = piece.token_ids
        return self._chunk(told)

    def summary(self) -> ChatCompletionChunk:
        """See `Dialect`."""
        return self._chunk()

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        answer = self.answer
        return ChatCompletionChunk(id=answer.id, created=answer.created, model=answer.model, choices=list(choices))

    def _choice(self, piece: Piece) -> ChatChoice:
        told = ChatChoice(
            index=piece.choice.index,
            message=ChatMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
        )
        if self._wants.token_ids:
            told.token_ids = piece.token_ids
        return told

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return None if self._wants.logprobs is None else chat_logprobs(piece.logprobs, self._wording)

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs:
        return prompt_logprobs(choice.prompt_logprobs, self._prompt_wording)
