"""Requests of a load: completions, chat, conversations, structured output, tool loops and embeddings.

A request knows the body to send, what a correct answer is beyond the protocol, and the request that follows it.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from loadtest.client.outcome import ClientKind, Outcome

City = Literal["Bremen", "Hameln", "Kassel", "Marburg", "Hanau"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One request to `/v1/completions`, and the behaviour of its client.

    cancel_after: number of chunks after which the client disconnects; None: it reads the whole response.
    bytes_per_second: rate at which the client reads the response; None: at once.
    return_token_ids: request token ids, so that each token is sent as an event, even if it ends within a character.
    expected: text of a correct completion; None: any text.
    on_end: called with the request and its outcome at the end.
    """

    path: ClassVar[str] = "/v1/completions"
    kind: ClassVar[str] = "completion"
    num_choices: ClassVar[int] = 1
    index: int
    prompt: str | Sequence[int | str]
    max_tokens: int
    client: ClientKind = ClientKind.STREAMING
    cancel_after: int | None = None
    bytes_per_second: float | None = None
    temperature: float = 1.0
    ignore_eos: bool = True
    seed: int = 0
    return_token_ids: bool = False
    expected: str | None = None
    on_end: Callable[["LoadRequest", Outcome], None] | None = field(default=None, compare=False)

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request. `model` None: the body names no model, and the service uses its own."""
        names = ("prompt", "max_tokens", "temperature", "ignore_eos", "seed")
        body = ({} if model is None else {"model": model}) | {name: getattr(self, name) for name in names}
        if self.client is not ClientKind.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}  # `usage` has the exact token counts
        return body | ({"return_token_ids": True} if self.return_token_ids else {})

    def plain(self) -> "LoadRequest":
        """Return the same request of a client that streams the whole response and reads it at once."""
        return replace(self, client=ClientKind.STREAMING, cancel_after=None, bytes_per_second=None)

    def flaw(self, outcome: Outcome) -> str:
        """Return the reason for which a complete answer is not a correct one; empty if it is correct."""
        return ""

    def follow_up(self, outcome: Outcome) -> "FollowUp | None":
        """Return the request that follows this one after a correct answer; None: none does."""
        return None


class FollowUp(NamedTuple):
    """Request that is sent at the earliest this long after the answer to the one before."""

    pause_seconds: float
    request: LoadRequest


class ChatRequest(LoadRequest):
    """Request to `/v1/chat/completions`. `prompt` is the texts of a conversation, of user and assistant by turns."""

    path = "/v1/chat/completions"
    kind = "chat"

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request, as `LoadRequest.body`."""
        body, roles = LoadRequest.body(self, model), itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, body.pop("prompt"), strict=False)]
        return body | {"messages": messages}


class LaterTurn(NamedTuple):
    """Later text of a conversation's user, the answer's most tokens, and the time to read and write before it."""

    text: str
    max_tokens: int
    think_seconds: float


@dataclass(frozen=True, kw_only=True)
class ConversationRequest(ChatRequest):
    """Turn of a conversation. The next turn repeats all texts so far, with the server's own answers."""

    later: Sequence[LaterTurn] = ()

    def follow_up(self, outcome: Outcome) -> FollowUp | None:
        """Return the next turn, with this turn's answer; None at the end of the conversation."""
        if not self.later:
            return None
        turn, *later = self.later
        prompt = [*self.prompt, outcome.text, turn.text]
        request = replace(self, prompt=prompt, max_tokens=turn.max_tokens, later=later, seed=self.seed + 1)
        return FollowUp(turn.think_seconds, request)


class Visit(msgspec.Struct, forbid_unknown_fields=True):
    """Answer of bounded length that a `StructuredRequest` asks for."""

    city: City
    days: Annotated[int, msgspec.Meta(ge=1, le=14)]
    guests: Annotated[list[Literal["adult", "child"]], msgspec.Meta(min_length=1, max_length=3)]
    is_booked: bool


class Weather(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the tool that a `ToolRequest` offers."""

    city: City
    days: Annotated[int, msgspec.Meta(ge=1, le=7)]


def schema_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a struct without references, which not every server resolves."""
    (schema,) = msgspec.json.schema_components([struct])[1].values()
    return {name: value for name, value in schema.items() if name not in ("title", "description")}


def _parsing_error(text: str, struct: type[msgspec.Struct]) -> str:
    try:
        msgspec.json.decode(text, type=struct)
    except msgspec.DecodeError as error:
        return f"{error}: {text[:60]!r}"
    return ""


class StructuredRequest(ChatRequest):
    """Request for JSON that follows the schema of `Visit`. An answer that does not is a failure."""

    kind = "structured"

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request, as `LoadRequest.body`."""
        form = {"name": "visit", "strict": True, "schema": schema_of(Visit)}
        return ChatRequest.body(self, model) | {"response_format": {"type": "json_schema", "json_schema": form}}

    def flaw(self, outcome: Outcome) -> str:
        """Return the error of parsing the answer; empty if it follows the schema."""
        return _parsing_error(outcome.text, Visit)


@dataclass(frozen=True, kw_only=True)
class ToolRequest(ChatRequest):
    """Request that the model must answer by calling a tool, and then the request with the tool's result.

    calls: the calls that the model made; empty in the first request.
    answer_tokens, tool_seconds: tokens of the final answer, duration of the tool.
    """

    kind = "tools"
    calls: Sequence[Mapping[str, Any]] = ()
    answer_tokens: int
    tool_seconds: float = 0.0

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request, as `LoadRequest.body`."""
        text = "Return the weather of the next days in a city."
        function = {"name": "get_weather", "description": text, "parameters": schema_of(Weather)}
        body = ChatRequest.body(self, model) | {"tools": [{"type": "function", "function": function}]}
        if not self.calls:
            return body | {"tool_choice": "required", "parallel_tool_calls": False}
        answer = {"role": "assistant", "content": "", "tool_calls": self.calls}
        result = json.dumps([{"day": day, "sun_hours": (self.seed + day) % 12} for day in range(3)])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in self.calls]
        return body | {"messages": [*body["messages"], answer, *results], "tool_choice": "none"}

    def flaw(self, outcome: Outcome) -> str:
        """Return the first error in the tool calls of the answer; empty if they are correct, or not asked for."""
        if self.calls:
            return ""
        functions = [call["function"] for call in outcome.tool_calls]
        errors = [f"unknown tool {each['name']!r}" for each in functions if each["name"] != "get_weather"]
        errors += [_parsing_error(each["arguments"], Weather) for each in functions]
        return next(filter(None, errors), "") if functions else "no tool call"

    def follow_up(self, outcome: Outcome) -> FollowUp | None:
        """Return the request with the tool's result; None after the final answer."""
        if self.calls:
            return None
        request = replace(self, calls=outcome.tool_calls, max_tokens=self.answer_tokens, seed=self.seed + 1)
        return FollowUp(self.tool_seconds, request)


class EmbeddingLoadRequest(LoadRequest):
    """Request to `/v1/embeddings`. Its response is neither streamed nor has it choices."""

    path = "/v1/embeddings"
    kind = "embedding"
    num_choices = 0

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request, as `LoadRequest.body`."""
        return ({} if model is None else {"model": model}) | {"input": self.prompt}

    def flaw(self, outcome: Outcome) -> str:
        """Return an error if the response has no vector."""
        return "" if outcome.embedding_size else "no embedding"
