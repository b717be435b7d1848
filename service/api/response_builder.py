"""Builders of the responses of `/v1/completions` and `/v1/chat/completions` from token deltas."""

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeAlias

from msgspec import UNSET

from model.chat.output_parser import OutputParser
from model.chat.tool_formats.tool_format import Part, PartKind
from model.tokenizer.interface import StreamDecoder, Tokenizer
from service.ipc.messages import Finish, FinishReason, TokenDelta
from service.preprocess.chat_renderer import ChatPlan
from service.protocol import responses
from service.protocol.completions import GenerationRequest
from service.protocol.errors import ApiError
from service.protocol.logprobs import LogprobFormat, LogprobWriter, chat_logprobs, prompt_logprobs
from service.protocol.responses import DONE, encode_event
from service.requests.inflight import Choice, Deltas

Event: TypeAlias = responses.Completion | responses.ChatCompletionChunk
ChatFinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Body: TypeAlias = responses.Completion | responses.ChatCompletion
# Placeholder in an encoded event, which is encoded once and then reused with other texts. No model's name contains it.
_ANY_TEXT = uuid.uuid4().hex
_TEXT = PartKind.TEXT  # an attribute of an enum class takes 10 times as long to read as a global variable (Python 3.11)


class ResponseBuilder(ABC):
    """Builder of one response: its body, or the events of its stream, between which the builder keeps state."""

    id_prefix: ClassVar[str]
    has_timings: ClassVar[bool] = True  # True: the event that ends the last choice has the field `timings`
    encode: Callable[[Any], bytes] = staticmethod(encode_event)  # returns an event as bytes of the stream
    _event_type: ClassVar[type[responses.Completion] | type[responses.ChatCompletionChunk]]

    def __init__(
        self,
        asked: GenerationRequest,
        *,
        response_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        visible_token_ids: frozenset[int] = frozenset(),
        chat: ChatPlan | None = None,
    ) -> None:
        self.asked = asked
        self._tokenizer = tokenizer
        self._chat = chat
        self._new_parser = None if chat is None else chat.new_parser
        self._parsers: dict[int, OutputParser] = {}  # by the choice's index
        self._num_logprobs = asked.num_logprobs
        self._shows_ids = bool(asked.return_token_ids)
        self._id = self.response_id = response_id
        self._created = created
        self._model = model
        self._logprob_format = LogprobFormat(
            tokenizer=tokenizer,
            num_top=self._num_logprobs or 0,
            names_are_ids=bool(asked.return_tokens_as_token_ids),
            visible_token_ids=visible_token_ids,
        )
        self._prompt_format = LogprobFormat(tokenizer=tokenizer, num_top=asked.prompt_logprobs or 0)
        self._writers: dict[int, LogprobWriter] = {}  # by the choice's index
        # By the choice's index: kind of its last part, and the bytes of that part's event before and after the text.
        self._frames: dict[int, tuple[PartKind, list[bytes]]] = {}
        self._has_opened = False

    @abstractmethod
    def body(self, wholes: Deltas, usage: responses.Usage, timings: responses.Timings) -> Body:
        """Return the body of the HTTP response, not yet encoded.

        wholes: each choice to return, with its deltas joined to one.
        """

    @abstractmethod
    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Event]:
        """Return a delta's stream events. With `is_first`, add the prompt's token ids and logprobs, if requested."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the encoded event that reports an error and ends the stream."""
        return encode_event(error.body())

    def plain_event(self, choice: Choice, text: str) -> bytes:
        """Return the encoded stream events of a token delta that has only text; b"" if its text completes no part.

        Call only after the choice's first event, and not for the delta that ends the choice or has logprobs.
        """
        index, kind = choice.index, _TEXT
        if self._new_parser is not None:
            parser = self._parsers.get(index) or self.parser_of(choice)
            if (plain_kind := parser.plain_kind(text)) is None:
                return b"".join([self._part_event(choice, *part) for part in parser.push(text)])
            kind = plain_kind
        frame = self._frames.get(index)
        if frame is not None and frame[0] is kind:  # `_framed`, inlined for speed: almost every token comes here
            return encode_event(text, b"", b"").join(frame[1])
        return self._part_event(choice, kind, text)

    def _part_event(self, choice: Choice, kind: PartKind, text: str) -> bytes:
        """Return the encoded stream events of a part of the completion; b"" for reasoning that is not shown."""
        return self._framed(choice, kind, text)

    def _framed(self, choice: Choice, kind: PartKind, text: str) -> bytes:
        """Return the encoded stream event of a text. The JSON around it is cached until the part kind changes."""
        frame = self._frames.get(choice.index)
        if frame is None or frame[0] is not kind:
            event = self.encode(self._text_event(choice, kind, _ANY_TEXT))
            frame = self._frames[choice.index] = kind, event.split(encode_event(_ANY_TEXT, b"", b""))
        return encode_event(text, b"", b"").join(frame[1])

    @abstractmethod
    def _text_event(self, choice: Choice, kind: PartKind, text: str) -> Event:
        """Return the event of one part of the output, not yet encoded.

        text: the part's text; of a part of kind CALL, the tool's name.
        """

    def end_of_stream(self, usage: responses.Usage | None, timings: responses.Timings) -> list[bytes]:
        """Return the encoded events after the last choice has ended: usage, unless it is None, and [DONE]."""
        events = [DONE]
        if usage is not None:
            summary = self._event_type(id=self._id, created=self._created, model=self._model, choices=[])
            summary.usage, summary.timings = usage, timings
            events.insert(0, encode_event(summary))
        return events

    def parser_of(self, choice: Choice) -> OutputParser:
        """Return the parser of a choice's text. Call only if the chat plan has parsers (for reasoning or calls)."""
        assert self._new_parser is not None
        if (parser := self._parsers.get(choice.index)) is None:
            parser = self._parsers[choice.index] = self._new_parser()
        return parser

    def num_reasoning_tokens(self, choices: Iterable[Choice]) -> int | None:
        """Return the number of reasoning tokens in the choices; None if the response is not parsed for reasoning."""
        if self._new_parser is None or self._chat is None:
            return None
        total, found = 0, False
        for choice in choices:
            parser = self._new_parser()
            found = found or parser.may_reason
            decoder = StreamDecoder(self._tokenizer, self._chat.visible_token_ids)
            number = 0
            for number, token_id in enumerate(choice.token_ids, 1):
                parser.push(decoder.push_one(token_id))
                if not parser.may_reason:
                    break
                if parser.has_reasoned and (end_id := self._chat.reasoning_end_id) is not None:
                    # Pushing each token of a long reasoning would delay other streams.
                    later = choice.token_ids[number:]
                    number += later.index(end_id) + 1 if end_id in later else len(later)
                    break
            total += number if parser.has_reasoned else 0
        return total if found else None

    def _prompt_logprobs(self, choice: Choice) -> responses.PromptLogprobs:
        return prompt_logprobs(choice.prompt_logprobs, self._prompt_format)


class CompletionBuilder(ResponseBuilder):
    """Builder of the response to a `/v1/completions` request."""

    id_prefix = "cmpl-"
    _event_type = responses.Completion

    def body(self, wholes: Deltas, usage: responses.Usage, timings: responses.Timings) -> responses.Completion:
        """Return the body, not yet encoded. Its choices are numbered from 0: `best_of` returns only some choices."""
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
        """Return a list of one event: text, requested logprobs and token ids. `is_first` adds those of the prompt."""
        reason, stop = _finish_fields(delta.finish)
        text = choice.prompt_text + delta.text if is_first else delta.text
        built = responses.CompletionChoice(
            index=choice.index, text=text, logprobs=None, finish_reason=reason, stop_reason=stop
        )
        if self._num_logprobs is not None:
            if choice.index not in self._writers:
                self._writers[choice.index] = LogprobWriter(self._logprob_format)
            prompt = choice.prompt_logprobs if is_first and self.asked.echoes else ()
            built.logprobs = self._writers[choice.index].write(
                delta.logprobs or (), prompt=prompt, num_hidden=choice.num_hidden_prompt_tokens
            )
        if self._shows_ids:
            built.token_ids = delta.token_ids
            if is_first:
                built.prompt_token_ids = choice.submit.prompt_token_ids
        if is_first and self.asked.prompt_logprobs is not None:
            built.prompt_logprobs = self._prompt_logprobs(choice)
        return [responses.Completion(id=self._id, created=self._created, model=self._model, choices=[built])]

    def _text_event(self, choice: Choice, kind: PartKind, text: str) -> Event:
        built = responses.CompletionChoice(
            index=choice.index, text=text, logprobs=None, finish_reason=None, stop_reason=None
        )
        return responses.Completion(id=self._id, created=self._created, model=self._model, choices=[built])


class ChatBuilder(ResponseBuilder):
    """Builder of a `/v1/chat/completions` response. In a stream, choice 0's first event has the prompt's logprobs."""

    id_prefix = "chatcmpl-"
    _event_type = responses.ChatCompletionChunk

    def __init__(self, asked: GenerationRequest, **about: Any) -> None:
        super().__init__(asked, **about)
        self._num_calls: dict[int, int] = {}  # number of the last call, by the choice's index
        self._shows_reasoning = getattr(asked, "include_reasoning", True) is not False

    def body(self, wholes: Deltas, usage: responses.Usage, timings: responses.Timings) -> responses.ChatCompletion:
        """Return the body of the HTTP response, not yet encoded, with one assistant message per choice."""
        first, _ = wholes[0]
        choices = []
        for choice, delta in wholes:
            message = self._message(choice, self._parts(choice, delta))
            reason, stop = self._finish_fields(choice, delta.finish)
            choices.append(
                responses.ChatChoice(
                    index=choice.index,
                    message=message,
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
        """Return the stream events of a token delta; with `is_first`, an event with the role `assistant` before them.

        The last event has the delta's logprobs, token ids and finish reason. Without such data, a delta that completes
        no part of the message has no event.
        """
        deltas = [shown for part in self._parts(choice, delta) if (shown := self._delta(choice, part)) is not None]
        shows_tokens = self._shows_ids or self._num_logprobs is not None
        if not deltas and (delta.finish is not None or (shows_tokens and delta.token_ids)):
            deltas.append(responses.ChatDelta())
        built = [responses.ChatChunkChoice(index=choice.index, delta=shown) for shown in deltas]
        if built:
            last = built[-1]
            last.logprobs = self._logprobs(delta) if delta.logprobs else None
            last.finish_reason, last.stop_reason = self._finish_fields(choice, delta.finish)
            last.token_ids = delta.token_ids if self._shows_ids else UNSET
        events: list[Event] = [self._chunk(each) for each in built]
        if not is_first:
            return events
        role = responses.ChatDelta(role="assistant", content="")
        opening = self._chunk(responses.ChatChunkChoice(index=choice.index, delta=role))
        if self._shows_ids and not self._has_opened:
            opening.prompt_token_ids = choice.submit.prompt_token_ids
        if self.asked.prompt_logprobs is not None and choice.index == 0:
            opening.prompt_logprobs = self._prompt_logprobs(choice)
        self._has_opened = True
        return [opening, *events]

    def _text_event(self, choice: Choice, kind: PartKind, text: str) -> Event:
        delta = self._delta(choice, Part(kind, text))
        assert delta is not None
        return self._chunk(responses.ChatChunkChoice(index=choice.index, delta=delta))

    def _part_event(self, choice: Choice, kind: PartKind, text: str) -> bytes:
        if kind is PartKind.REASONING and not self._shows_reasoning:
            return b""
        if kind is PartKind.CALL:
            self._frames.pop(choice.index, None)  # frame of the last call's arguments
            return encode_event(self._text_event(choice, kind, text))
        return self._framed(choice, kind, text)

    def _chunk(self, choice: responses.ChatChunkChoice) -> responses.ChatCompletionChunk:
        return responses.ChatCompletionChunk(id=self._id, created=self._created, model=self._model, choices=[choice])

    def _parts(self, choice: Choice, delta: TokenDelta) -> list[Part]:
        """Return the parts (text, reasoning, calls) that a token delta completes; at the end, also those held back."""
        if self._new_parser is None:
            return [Part(PartKind.TEXT, delta.text)] if delta.text else []
        parser = self.parser_of(choice)
        return [*parser.push(delta.text), *(parser.flush() if delta.finish is not None else ())]

    def _delta(self, choice: Choice, part: Part) -> responses.ChatDelta | None:
        """Return a part's stream delta; a new tool call gets the next number. None for reasoning that is not shown."""
        match part.kind:
            case PartKind.TEXT:
                return responses.ChatDelta(content=part.text)
            case PartKind.REASONING:
                if not self._shows_reasoning:
                    return None
                return responses.ChatDelta(reasoning_content=part.text, reasoning=part.text)
            case PartKind.CALL:
                number = self._num_calls[choice.index] = self._num_calls.get(choice.index, -1) + 1
                call = responses.ToolCallDelta(
                    index=number,
                    id=self._call_id(choice, number),
                    type="function",
                    function=responses.FunctionDelta(name=part.text, arguments=""),
                )
                return responses.ChatDelta(tool_calls=[call])
            case PartKind.ARGUMENTS:
                number = self._num_calls[choice.index]
                piece = responses.FunctionDelta(arguments=part.text)
                return responses.ChatDelta(tool_calls=[responses.ToolCallDelta(index=number, function=piece)])

    def _message(self, choice: Choice, parts: list[Part]) -> responses.ChatMessage:
        """Return the message made of all parts of a completion, without reasoning that the client does not want."""
        calls: list[responses.ToolCall] = []
        texts = {PartKind.TEXT: "", PartKind.REASONING: ""}
        for kind, text in parts:
            if kind is PartKind.CALL:
                function = responses.FunctionCall(name=text, arguments="")
                calls.append(responses.ToolCall(id=self._call_id(choice, len(calls)), function=function))
            elif kind is PartKind.ARGUMENTS:
                calls[-1].function.arguments += text
            else:
                texts[kind] += text
        content, reasoning = texts[PartKind.TEXT], texts[PartKind.REASONING]
        message = responses.ChatMessage(content=None if calls and not content else content)
        if reasoning and self._shows_reasoning:
            message.reasoning_content = message.reasoning = reasoning
        if calls:
            message.tool_calls = calls
        return message

    def _call_id(self, choice: Choice, number: int) -> str:
        """Return the id of a choice's tool call, derived from the choice's uid and the call's number."""
        digest = hashlib.blake2b(f"{choice.submit.uid}:{number}".encode(), digest_size=12).hexdigest()
        length = None if self._chat is None else self._chat.call_id_length
        return f"call_{digest}" if length is None else digest[:length]

    def _finish_fields(self, choice: Choice, finish: Finish | None) -> tuple[ChatFinishReason | None, str | int | None]:
        """Return the fields `finish_reason` and `stop_reason`.

        `finish_reason` is `tool_calls` if the completion has tool calls and the model ended it. It is `stop` if a
        stop string or stop token of the client ended it, even after or within a call.
        """
        reason, stop = _finish_fields(finish)
        parser = self._parsers.get(choice.index)
        is_whole = reason == "stop" and stop is None
        return ("tool_calls" if is_whole and parser is not None and parser.num_calls else reason), stop

    def _logprobs(self, delta: TokenDelta) -> responses.ChatLogprobs | None:
        return None if self._num_logprobs is None else chat_logprobs(delta.logprobs or (), self._logprob_format)


def _finish_fields(finish: Finish | None) -> tuple[Literal["stop", "length"] | None, str | int | None]:
    """Return the fields `finish_reason` (None before the end) and `stop_reason` (matched stop string or id, if any)."""
    if finish is None:
        return None, None
    return "stop" if finish.reason is FinishReason.STOP else "length", finish.stop_reason
