"""Builder of the response to a `/v1/messages` request, and of its stream events."""

from typing import Any

from pydantic_core import from_json

from model.chat.tool_formats.tool_format import Part, PartKind
from service.api.response_builder import ChatBuilder
from service.ipc.messages import Finish, TokenDelta
from service.protocol import responses
from service.protocol.completions import GenerationRequest
from service.protocol.errors import ApiError
from service.protocol.messages import (
    BlockDelta,
    GeneratedMessage,
    MessageEvent,
    MessageUsage,
    OutputBlock,
    StopReason,
    message_usage,
    messages_error,
)
from service.protocol.responses import encode_named_event
from service.requests.inflight import Choice


class MessagesBuilder(ChatBuilder):
    """Builder of the response to a `/v1/messages` request. Such a request has one choice.

    A message is a list of blocks: text, thinking or tool calls. The parser splits the completion into parts, each a
    piece of one block. A block is open from its first part to the first part of the next block.

    Args:
        request_id: id of the HTTP request, which error events contain.
    """

    id_prefix = "msg_"
    has_timings = False

    def __init__(self, asked: GenerationRequest, *, request_id: str | None = None, **about: Any) -> None:
        super().__init__(asked, **about)
        self._request_id = request_id
        self._open: PartKind | None = None  # kind of the open block
        self._num_blocks = 0
        self._stop_reason: StopReason = "end_turn"
        self._stop_sequence: str | None = None

    def body(self, wholes: Any, usage: responses.Usage, timings: responses.Timings) -> Any:
        """Return the response body, not yet encoded. A tool call that was cut off has the `input` {}."""
        ((choice, delta),) = wholes
        blocks: list[OutputBlock] = []
        arguments: dict[int, str] = {}  # JSON text, by the block's index
        for part in self._visible_parts(choice, delta):
            if part.kind is PartKind.ARGUMENTS:
                arguments[len(blocks) - 1] = arguments.get(len(blocks) - 1, "") + part.text
                continue
            if begun := self._begun(choice, part):
                blocks.append(begun)
            match part.kind:
                case PartKind.TEXT:
                    blocks[-1].text += part.text  # type: ignore[operator]  # UNSET only in other blocks
                case PartKind.REASONING:
                    blocks[-1].thinking += part.text  # type: ignore[operator]
        for index, text in arguments.items():
            blocks[index].input = _json_object(text)
        self._end(choice, delta.finish)
        return self._generated(blocks, message_usage(usage), self._stop_reason)

    def events(self, choice: Choice, delta: TokenDelta, *, is_first: bool) -> list[Any]:
        """Return a token delta's events; with `is_first`, after `message_start`. The last delta ends the open block."""
        events = []
        if is_first:
            usage = MessageUsage(input_tokens=choice.num_prompt_tokens, output_tokens=0)
            events = [MessageEvent(type="message_start", message=self._generated([], usage))]
        for part in self._visible_parts(choice, delta):
            events += self._opened(choice, part)
            if part.kind is not PartKind.CALL and part.text:
                events.append(self._text_event(choice, part.kind, part.text))
        if delta.finish is not None:
            events += self._closed()
            self._end(choice, delta.finish)
        return events

    encode = staticmethod(encode_named_event)

    def error_event(self, error: ApiError) -> bytes:
        """Return the encoded event that reports an error and ends the stream."""
        return self.encode(messages_error(error, self._request_id))

    def end_of_stream(self, usage: responses.Usage | None, timings: responses.Timings) -> list[bytes]:
        """Return the encoded last events: `message_delta`, with stop reason and usage, and `message_stop`."""
        assert usage is not None
        delta = BlockDelta(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        ending = MessageEvent(type="message_delta", delta=delta, usage=message_usage(usage))
        return [self.encode(ending), self.encode(MessageEvent(type="message_stop"))]

    def _part_event(self, choice: Choice, kind: PartKind, text: str) -> bytes:
        if kind is PartKind.REASONING and not self._shows_reasoning:
            return b""
        opened = b"".join(map(self.encode, self._opened(choice, Part(kind, text))))
        if kind is PartKind.CALL:
            self._frames.pop(choice.index, None)  # frame of the last call's arguments
            return opened
        return opened + self._framed(choice, kind, text)

    def _text_event(self, choice: Choice, kind: PartKind, text: str) -> Any:
        match kind:
            case PartKind.REASONING:
                return self._delta_event(BlockDelta(type="thinking_delta", thinking=text))
            case PartKind.ARGUMENTS:
                return self._delta_event(BlockDelta(type="input_json_delta", partial_json=text))
            case _:
                return self._delta_event(BlockDelta(type="text_delta", text=text))

    def _delta_event(self, delta: BlockDelta) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _visible_parts(self, choice: Choice, delta: TokenDelta) -> list[Part]:
        """Return the parts that a delta completes, without hidden reasoning. An empty message has one empty text."""
        parts = self._parts(choice, delta)
        if not self._shows_reasoning:
            parts = [part for part in parts if part.kind is not PartKind.REASONING]
        is_empty = delta.finish is not None and not parts and not self._num_blocks
        return [Part(PartKind.TEXT, "")] if is_empty else parts

    def _opened(self, choice: Choice, part: Part) -> list[MessageEvent]:
        """If a part begins a block of the message, end the open block and open the new one.

        Return their events; else [].
        """
        last = self._closed() if self._begins(part) else []
        if (block := self._begun(choice, part)) is None:
            return []
        return [*last, MessageEvent(type="content_block_start", index=self._num_blocks - 1, content_block=block)]

    def _begins(self, part: Part) -> bool:
        return part.kind is PartKind.CALL or part.kind not in (self._open, PartKind.ARGUMENTS)

    def _begun(self, choice: Choice, part: Part) -> OutputBlock | None:
        """Open and return a new, empty block if this part begins one; None if the part belongs to the open block."""
        if not self._begins(part):
            return None
        self._open = part.kind
        self._num_blocks += 1
        match part.kind:
            case PartKind.CALL:
                number = self._num_calls[choice.index] = self._num_calls.get(choice.index, -1) + 1
                call_id = self._call_id(choice, number).removeprefix("call_")
                return OutputBlock(type="tool_use", id=f"toolu_{call_id}", name=part.text, input={})
            case PartKind.REASONING:
                return OutputBlock(type="thinking", thinking="", signature="")
            case _:
                return OutputBlock(type="text", text="")

    def _closed(self) -> list[MessageEvent]:
        """End the message's open block. Return its last events; [] if no block is open."""
        if (kind := self._open) is None:
            return []
        self._open = None
        stop = MessageEvent(type="content_block_stop", index=self._num_blocks - 1)
        signature = self._delta_event(BlockDelta(type="signature_delta", signature=""))
        return [signature, stop] if kind is PartKind.REASONING else [stop]

    def _generated(
        self, blocks: list[OutputBlock], usage: MessageUsage, stop_reason: StopReason | None = None
    ) -> GeneratedMessage:
        return GeneratedMessage(
            id=self._id,
            model=self._model,
            content=blocks,
            stop_reason=stop_reason,
            stop_sequence=self._stop_sequence,
            usage=usage,
        )

    def _end(self, choice: Choice, finish: Finish | None) -> None:
        """Set the message's stop reason and stop sequence from the choice's finish."""
        reason, stop = self._finish_fields(choice, finish)
        if isinstance(stop, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", stop
        elif reason == "tool_calls":
            self._stop_reason = "tool_use"
        elif reason == "length":
            is_full = choice.submit.params.max_tokens < self.asked.value("max_tokens")
            self._stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Return an empty object for any other text, such as one that was cut off."""
    try:
        value = from_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
