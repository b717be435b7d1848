"""Builder of the response to a `/v1/responses` request, and of its stream events."""

import time
from typing import Any

from model.chat.output_parser import OutputParser
from model.chat.tool_formats.tool_format import Part, PartKind
from model.tokenizer.interface import StreamDecoder
from service.api.response_builder import ChatBuilder
from service.ipc.messages import Finish, FinishReason, TokenDelta
from service.protocol import responses
from service.protocol.completions import GenerationRequest
from service.protocol.errors import ApiError
from service.protocol.logprobs import chat_logprobs
from service.protocol.model_responses import (
    IncompleteDetails,
    ItemStatus,
    ModelResponse,
    ModelResponseEvent,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseStatus,
    response_failure,
    response_usage,
)
from service.protocol.responses import ChatTokenLogprob, encode, encode_event, encode_named_event
from service.protocol.responses_request import ResponsesRequest
from service.requests.inflight import Choice
from service.requests.stored_responses import StoredResponse

_DELTAS = {
    PartKind.TEXT: "response.output_text",
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
}
_EMPTY_DELTA = b'"","sequence_number":0}\n\n'


class ResponsesBuilder(ChatBuilder):
    """Builder of the response to a `/v1/responses` request. Such a request has one choice.

    A response is a list of output items: messages, reasoning or function calls. The parser splits the completion into
    parts, each a piece of one item. An item is open from its first part to the first part of the next item.

    Args:
        origin: the request, whose fields the response repeats.
        record: gets the response when it ends; None: the response is not stored.
    """

    id_prefix = "resp_"
    has_timings = False  # the last event has the whole response with its timings

    def __init__(
        self, asked: GenerationRequest, *, origin: ResponsesRequest, record: StoredResponse | None, **about: Any
    ) -> None:
        super().__init__(asked, **about)
        self._echo = {**origin.echo(), "store": record is not None}
        self._record = record
        self._output: list[OutputItem] = []
        self._open: PartKind | None = None  # kind of the open item
        self._pieces: list[str] = []  # text or arguments of the open item
        self._logprobs_of_item: list[ChatTokenLogprob] = []
        self._unsent_logprobs: list[ChatTokenLogprob] = []
        self._message_tokens: MessageTokens | None = None
        self._before_delta = b""  # encoded delta event of the open item, up to its text
        self._num_events = 0
        self._finish: Finish | None = None
        if self._num_logprobs is not None and self._new_parser is not None and self._chat is not None:
            decoder = StreamDecoder(self._tokenizer, self._chat.visible_token_ids)
            self._message_tokens = MessageTokens(self._new_parser(), decoder)
        if record is not None:
            record.begin(self._id, self.snapshot)

    def body(self, wholes: Any, usage: responses.Usage, timings: responses.Timings) -> Any:
        """Return the finished response, not yet encoded. Store it if the builder has a record."""
        ((choice, delta),) = wholes
        self.events(choice, delta, is_first=True)
        return self._end(usage, timings)

    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Any]:
        """Return a delta's events; with `is_first`, after the two events that begin a stream.

        The last delta ends the open item.
        """
        events = []
        if is_first:
            begun = self._response("in_progress")
            events = [self._event("response.created", response=begun)]
            events.append(self._event("response.in_progress", response=begun))
        self._unsent_logprobs += self._text_logprobs(delta)
        for part in self._parts(choice, delta):
            events += self._opened(choice, part)
            if part.kind is not PartKind.CALL:
                events.append(self._delta_event(part.text))
        if delta.finish is None:
            return events
        self._finish = delta.finish
        if not self._output:
            events += self._opened(choice, Part(PartKind.TEXT, ""))
        return [*events, *self._closed("incomplete" if self._is_cut else "completed")]

    encode = staticmethod(encode_named_event)

    def error_event(self, error: ApiError) -> bytes:
        """Store the response as failed, if the builder has a record.

        Return the encoded event `response.failed`, or `error` if no event came before.
        """
        response = self._response("failed")
        response.error = response_failure(error)
        self._keep(response)
        if self._num_events:
            return self.encode(self._event("response.failed", response=response))
        return self.encode(self._event("error", code=error.code, message=error.message, param=error.param))

    def end_of_stream(self, usage: responses.Usage | None, timings: responses.Timings) -> list[bytes]:
        """Return the encoded last event, with the finished response. Store it if the builder has a record."""
        assert usage is not None
        response = self._end(usage, timings)
        return [self.encode(self._event(f"response.{response.status}", response=response))]

    def snapshot(self, *, error: ApiError | None = None, is_cancelled: bool = False) -> bytes:
        """Return the JSON of the response so far: as failed with `error`, as cancelled, else as queued or running."""
        if error is None and not is_cancelled:
            return encode(self._response("in_progress" if self._num_events else "queued"))
        response = self._response("cancelled" if error is None else "failed")
        response.error = None if error is None else response_failure(error)
        return encode(response)

    def _part_event(self, choice: Choice, kind: PartKind, text: str) -> bytes:
        if kind is self._open and kind is not PartKind.CALL:
            return self._plain_delta(text)
        opened = b"".join(map(self.encode, self._opened(choice, Part(kind, text))))
        return opened if kind is PartKind.CALL else opened + self._plain_delta(text)

    def _plain_delta(self, text: str) -> bytes:
        self._pieces.append(text)
        self._num_events += 1
        after = b',"sequence_number":%d}\n\n' % (self._num_events - 1)
        return encode_event(text, self._before_delta, after)

    def _event(self, kind: str, **fields: Any) -> ModelResponseEvent:
        self._num_events += 1
        return ModelResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields)

    @property
    def _is_cut(self) -> bool:
        return self._finish is not None and self._finish.reason is FinishReason.LENGTH

    @property
    def _item_fields(self) -> dict[str, Any]:
        """Event fields that identify the open output item and its content part, which a function call lacks."""
        place: dict[str, Any] = {"item_id": self._output[-1].id, "output_index": len(self._output) - 1}
        return place if self._open is PartKind.CALL else {**place, "content_index": 0}

    def _opened(self, choice: Choice, part: Part) -> list[ModelResponseEvent]:
        """If a part begins an output item, end the open item and open the new one.

        Return the events of both; else [].
        """
        item_kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        if item_kind is self._open and part.kind is not PartKind.CALL:
            return []
        events = self._closed("completed")
        index = len(self._output)
        unique = f"{choice.submit.uid}{index:03d}"
        item: OutputItem
        match part.kind:
            case PartKind.CALL:
                number = sum(isinstance(each, OutputFunctionCall) for each in self._output)
                call_id = self._call_id(choice, number)
                item = OutputFunctionCall(
                    id=f"fc_{unique}", status="in_progress", call_id=call_id, name=part.text, arguments=""
                )
            case PartKind.REASONING:
                item = OutputReasoning(id=f"rs_{unique}", status="in_progress", content=[])
            case _:
                item = OutputMessage(id=f"msg_{unique}", status="in_progress", content=[])
        self._output.append(item)
        self._open = part.kind
        events.append(self._event("response.output_item.added", output_index=index, item=item))
        if (empty := self._part("", [])) is not None:
            events.append(self._event("response.content_part.added", **self._item_fields, part=empty))
        logprobs: dict[str, Any] = {"logprobs": []} if part.kind is PartKind.TEXT else {}
        frame = ModelResponseEvent(
            type=f"{_DELTAS[part.kind]}.delta", **self._item_fields, **logprobs, delta="", sequence_number=0
        )
        self._before_delta = self.encode(frame).removesuffix(_EMPTY_DELTA)
        return events

    def _delta_event(self, text: str) -> ModelResponseEvent:
        """Append a text to the open output item. Return its event, which in a message has the logprobs not sent yet."""
        assert self._open is not None
        self._pieces.append(text)
        logprobs: dict[str, Any] = {}
        if self._open is PartKind.TEXT:
            logprobs["logprobs"] = self._unsent_logprobs
            self._logprobs_of_item += self._unsent_logprobs
            self._unsent_logprobs = []
        return self._event(f"{_DELTAS[self._open]}.delta", **self._item_fields, delta=text, **logprobs)

    def _closed(self, status: ItemStatus) -> list[ModelResponseEvent]:
        """End the open output item with this status. Return its last events, with its whole text; [] without one."""
        if self._open is None:
            return []
        kind, index = self._open, len(self._output) - 1
        # Logprobs of tokens that added no text, such as the rest of a stop string.
        events = [self._delta_event("")] if kind is PartKind.TEXT and self._unsent_logprobs else []
        place, whole = self._item_fields, self._whole(status)
        self._output[-1] = whole
        part = self._part("".join(self._pieces), self._logprobs_of_item)
        if isinstance(whole, OutputFunctionCall):
            done: dict[str, Any] = {"name": whole.name, "arguments": whole.arguments}
        else:
            done = {"text": whole.content[0].text}
            done |= {"logprobs": self._logprobs_of_item} if kind is PartKind.TEXT else {}
        events.append(self._event(f"{_DELTAS[kind]}.done", **place, **done))
        if part is not None:
            events.append(self._event("response.content_part.done", **place, part=part))
        events.append(self._event("response.output_item.done", output_index=index, item=whole))
        self._open, self._pieces, self._logprobs_of_item = None, [], []
        return events

    def _part(self, text: str, logprobs: list[ChatTokenLogprob]) -> OutputText | ReasoningText | None:
        """Return a content part with this text for the open output item; None for a function call, which has none."""
        match self._open:
            case PartKind.TEXT:
                return OutputText(text=text, logprobs=logprobs)
            case PartKind.REASONING:
                return ReasoningText(text=text)
            case _:
                return None

    def _whole(self, status: ItemStatus) -> OutputItem:
        """Return a copy of the open output item, with its text so far and this status."""
        item, text = self._output[-1], "".join(self._pieces)
        match item:
            case OutputMessage():
                part = OutputText(text=text, logprobs=self._logprobs_of_item)
                return OutputMessage(id=item.id, status=status, content=[part])
            case OutputReasoning():
                return OutputReasoning(id=item.id, status=status, content=[ReasoningText(text=text)])
            case OutputFunctionCall():
                return OutputFunctionCall(
                    id=item.id, status=status, call_id=item.call_id, name=item.name, arguments=text
                )

    def _response(self, status: ResponseStatus) -> ModelResponse:
        """Return the response so far, with this status. An open item is incomplete unless the status is in_progress."""
        output = list(self._output)
        if self._open is not None:
            output[-1] = self._whole("in_progress" if status == "in_progress" else "incomplete")
        return ModelResponse(
            id=self._id, created_at=self._created, status=status, model=self._model, output=output, **self._echo
        )

    def _end(self, usage: responses.Usage, timings: responses.Timings) -> ModelResponse:
        """Return the finished response, with usage and timings, and store it if the builder has a record."""
        response = self._response("incomplete" if self._is_cut else "completed")
        response.usage, response.timings = response_usage(usage), timings
        if self._is_cut:
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        self._keep(response)
        return response

    def _keep(self, response: ModelResponse) -> None:
        if self._record is not None:
            self._record.end(encode(response))

    def _text_logprobs(self, delta: TokenDelta) -> list[ChatTokenLogprob]:
        """Return the logprobs now known to be of message text, up to this delta; [] if none are requested."""
        if self._num_logprobs is None:
            return []
        entries = chat_logprobs(delta.logprobs or (), self._logprob_format).content
        for entry in entries:
            for each in (entry, *entry.top_logprobs):
                each.bytes = each.bytes or []  # OpenAI's clients expect a list, for special tokens too
        if self._message_tokens is None:
            return entries
        token_ids = [entry.token_id for entry in delta.logprobs or ()]
        return self._message_tokens.select(token_ids, entries, is_end=delta.finish is not None)


class MessageTokens:
    """Filter of the logprobs of a completion, which drops the tokens of reasoning and tool calls."""

    def __init__(self, parser: OutputParser, decoder: StreamDecoder) -> None:
        self._parser = parser
        self._decoder = decoder
        self._undecided: list[ChatTokenLogprob] = []  # tokens since the last part, such as the first of a special tag
        self._is_text = False  # the last part was text

    def select(self, token_ids: list[int], entries: list[ChatTokenLogprob], *, is_end: bool) -> list[ChatTokenLogprob]:
        """Filter the logprobs of the next tokens. A logprob waits until the parser shows if its token is message text.

        Returns the logprobs now known to be of message text, with those of earlier calls that had to wait.
        """
        found: list[ChatTokenLogprob] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            is_reasoning = self._parser.may_reason
            kinds = {part.kind for part in self._parser.push(self._decoder.push_one(token_id))}
            if is_reasoning and PartKind.TEXT not in kinds:
                continue
            self._undecided.append(entry)
            found += self._decided(kinds)
        return [*found, *self._decided({part.kind for part in self._parser.flush()}, is_end=True)] if is_end else found

    def _decided(self, kinds: set[PartKind], *, is_end: bool = False) -> list[ChatTokenLogprob]:
        """Return the waiting logprobs if their tokens are message text, else drop them and return [].

        `kinds`: kinds of the new parts, which decide. Without new parts the logprobs keep waiting, except at the end,
        where the kinds of the most recent parts decide.
        """
        if not kinds and not is_end:
            return []
        self._is_text = PartKind.TEXT in kinds if kinds else self._is_text
        decided, self._undecided = self._undecided, []
        return decided if self._is_text else []
