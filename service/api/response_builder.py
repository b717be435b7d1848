"""Builders of the responses of `/v1/completions` and `/v1/chat/completions` from token deltas."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

from msgspec import UNSET

from model.tokenizer.interface import Tokenizer
from service.ipc.messages import Finish, FinishReason, TokenDelta
from service.protocol import responses
from service.protocol.completions import GenerationRequest
from service.protocol.logprobs import LogprobFormat, LogprobWriter, chat_logprobs, prompt_logprobs
from service.protocol.responses import encode_event
from service.requests.inflight import Choice, Deltas

Event: TypeAlias = responses.Completion | responses.ChatCompletionChunk
Body: TypeAlias = responses.Completion | responses.ChatCompletion
# Delta of the event that serves as a template for events that differ only in their text.
_ANY_DELTA = TokenDelta(
    uid="", attempt=0, index=0, token_ids=(), text="\0text\0", logprobs=None, prompt_logprobs=None, finish=None
)


class ResponseBuilder(ABC):
    """Builder of the JSON body or the stream events of one response. Keeps state between the events of a stream."""

    id_prefix: ClassVar[str]
    _event_type: ClassVar[type[responses.Completion] | type[responses.ChatCompletionChunk]]

    def __init__(
        self, asked: GenerationRequest, *, response_id: str, created: int, model: str, tokenizer: Tokenizer
    ) -> None:
        self.asked = asked
        self._num_logprobs = asked.num_logprobs
        self._shows_ids = bool(asked.return_token_ids)
        self._id = self.response_id = response_id
        self._created = created
        self._model = model
        self._logprob_format = LogprobFormat(
            tokenizer=tokenizer, num_top=self._num_logprobs or 0, names_are_ids=bool(asked.return_tokens_as_token_ids)
        )
        self._prompt_format = LogprobFormat(tokenizer=tokenizer, num_top=asked.prompt_logprobs or 0)
        self._writers: dict[int, LogprobWriter] = {}  # by the choice's index
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # event before and after its text
        self._has_opened = False

    @abstractmethod
    def body(self, wholes: Deltas, usage: responses.Usage, timings: responses.Timings) -> Body:
        """Return the response's JSON body. `wholes` has for each choice all its token deltas joined to one."""

    @abstractmethod
    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return the stream events of a token delta; with `is_first`, also the requested data of the prompt."""

    def summary(self) -> Event:
        """Return a stream event without choices, for the usage after the last choice has finished."""
        return self._event_type(id=self._id, created=self._created, model=self._model, choices=[])

    def plain_event(self, choice: Choice, text: str) -> bytes:
        """Return the encoded stream event of a token delta that is only text, from a cached event with another text."""
        if (frame := self._frames.get(choice.index)) is None:
            (event,) = self.events(choice, _ANY_DELTA, is_first=False)
            before, _, after = encode_event(event).rpartition(encode_event(_ANY_DELTA.text, b"", b""))
            frame = self._frames[choice.index] = before, after
        return encode_event(text, *frame)

    def _prompt_logprobs(self, choice: Choice) -> responses.PromptLogprobs:
        return prompt_logprobs(choice.prompt_logprobs, self._prompt_format)


class CompletionBuilder(ResponseBuilder):
    """Builder of the response to a `/v1/completions` request."""

    id_prefix = "cmpl-"
    _event_type = responses.Completion

    def body(self, wholes: Deltas, usage: responses.Usage, timings: responses.Timings) -> responses.Completion:
        """Return the JSON body. The choices are numbered anew from 0, because `best_of` returns only some of them."""
        choices: list[responses.CompletionChoice] = []
        for index, (choice, delta) in enumerate(wholes):
            (event,) = self.events(choice, delta, is_first=True)
            assert isinstance(event, responses.Completion)
            event.choices[0].index = index
            choices += event.choices
        return responses.Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, timings=timings
        )

    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return a list of one stream event with the text of a token delta and the requested logprobs and token ids."""
        reason, stop = _finish_fields(delta.finish)
        text = choice.prompt_text + delta.text if is_first else delta.text
        built = responses.CompletionChoice(
            index=choice.index, text=text, logprobs=None, finish_reason=reason, stop_reason=stop
        )
        if self._num_logprobs is not None:
            if choice.index not in self._writers:
                self._writers[choice.index] = LogprobWriter(self._logprob_format)
            prompt = choice.prompt_logprobs if is_first and self.asked.echoes else ()
            built.logprobs = self._writers[choice.index].write(delta.logprobs or (), prompt=prompt)
        if self._shows_ids:
            built.token_ids = delta.token_ids
            if is_first:
                built.prompt_token_ids = choice.submit.prompt_token_ids
        if is_first and self.asked.prompt_logprobs is not None:
            built.prompt_logprobs = self._prompt_logprobs(choice)
        return [responses.Completion(id=self._id, created=self._created, model=self._model, choices=[built])]


class ChatBuilder(ResponseBuilder):
    """Builder of the response to a `/v1/chat/completions` request. In a stream, choice 0 has the prompt's logprobs."""

    id_prefix = "chatcmpl-"
    _event_type = responses.ChatCompletionChunk

    def body(self, wholes: Deltas, usage: responses.Usage, timings: responses.Timings) -> responses.ChatCompletion:
        """Return the JSON body: one assistant message per choice."""
        first, _ = wholes[0]
        choices = []
        for choice, delta in wholes:
            reason, stop = _finish_fields(delta.finish)
            choices.append(
                responses.ChatChoice(
                    index=choice.index,
                    message=responses.ChatMessage(content=delta.text),
                    logprobs=self._logprobs(delta),
                    finish_reason=reason,
                    stop_reason=stop,
                    token_ids=delta.token_ids if self._shows_ids else UNSET,
                )
            )
        return responses.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            timings=timings,
            prompt_token_ids=first.submit.prompt_token_ids if self._shows_ids else UNSET,
            prompt_logprobs=UNSET if self.asked.prompt_logprobs is None else self._prompt_logprobs(first),
        )

    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return the stream event of a token delta; with `is_first`, an event with the role `assistant` before it."""
        reason, stop = _finish_fields(delta.finish)
        built = responses.ChatChunkChoice(
            index=choice.index,
            delta=responses.ChatDelta(content=delta.text) if delta.text else responses.ChatDelta(),
            logprobs=self._logprobs(delta) if delta.logprobs else None,
            finish_reason=reason,
            stop_reason=stop,
            token_ids=delta.token_ids if self._shows_ids else UNSET,
        )
        event = responses.ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[built])
        if not is_first:
            return [event]
        role = responses.ChatDelta(role="assistant", content="")
        begin = responses.ChatChunkChoice(index=choice.index, delta=role)
        opening = responses.ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[begin])
        if self._shows_ids and not self._has_opened:
            opening.prompt_token_ids = choice.submit.prompt_token_ids
        if self.asked.prompt_logprobs is not None and choice.index == 0:
            opening.prompt_logprobs = self._prompt_logprobs(choice)
        self._has_opened = True
        return [opening, event]

    def _logprobs(self, delta: TokenDelta) -> responses.ChatLogprobs | None:
        return None if self._num_logprobs is None else chat_logprobs(delta.logprobs or (), self._logprob_format)


def _finish_fields(finish: Finish | None) -> tuple[Literal["stop", "length"] | None, str | int | None]:
    """Return a choice's response fields `finish_reason`, None while it is unfinished, and `stop_reason`."""
    if finish is None:
        return None, None
    return "stop" if finish.reason is FinishReason.STOP else "length", finish.stop_reason
