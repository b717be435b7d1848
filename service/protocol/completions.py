"""Request bodies of the OpenAI API.

Validation is strict: "1" is not a number, and true is not 1. Unknown fields are rejected by name. Every optional field
may be null, which means its default.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from model.sampling.params import (
    LOGIT_BIAS_RANGE,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    PENALTY_RANGE,
    REPETITION_RANGE,
)
from service.config.validation_messages import reword, unknown_field
from service.protocol.errors import InvalidRequest
from service.protocol.request_model import RequestModel as RequestModel  # re-exported
from service.protocol.response_format import OutputConstraint, ResponseFormat, StructuredOutputs, output_constraint

Model = TypeVar("Model", bound="RequestModel")


# fail_fast: a million wrong items make one error, not a million. `RequestProcessor` checks the vocabulary's bounds.
# A stop string is bounded because each token's text is searched for every stop string.
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
TokenIds = Annotated[list[Annotated[int, Field(ge=-(2**63), lt=2**63)]], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NumKept = Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)]
MAX_STOPS = 16
MAX_CHOICES = 128
MAX_PROMPTS = MAX_MESSAGES = 4096
MAX_PARTS = 256  # of one message
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
SEED_RANGE = (-(2**63), 2**64 - 1)
Penalty = Annotated[float, Field(ge=PENALTY_RANGE[0], le=PENALTY_RANGE[1])]
LogitBias = Annotated[float, Field(ge=LOGIT_BIAS_RANGE[0], le=LOGIT_BIAS_RANGE[1])]
BadWord = Annotated[str, Field(min_length=1, max_length=100)]
Timeout = Annotated[float, Field(gt=0, le=86_400, description="seconds the request may wait in the queue")]
# Limits starvation: a level is worth `AGEING_SECONDS` of waiting, and the whole range is 2,000 levels.
MAX_PRIORITY = 1000


class StreamOptions(RequestModel):
    """`stream_options`: usage statistics within a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(RequestModel):
    """Fields common to `POST /v1/completions` and `POST /v1/chat/completions`.

    Read fields through `value` and the properties, which replace null by the default.
    """

    # Unsupported fields of the API, each with the values that have no effect and so are accepted.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = 0
    ignore_eos: bool | None = False
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1: off")] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(ge=SEED_RANGE[0], le=SEED_RANGE[1])] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: Annotated[float, Field(ge=REPETITION_RANGE[0], le=REPETITION_RANGE[1])] | None = 1.0
    logit_bias: (
        Annotated[dict[str, LogitBias], Field(max_length=MAX_LOGIT_BIASES, description="by token id, as a string")]
        | None
    ) = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: NumKept | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: (
        Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="lower values are scheduled first")] | None
    ) = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    timeout: Timeout | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield "", self
        if self.stream_options is not None:
            yield "stream_options.", self.stream_options
        for part in (self.response_format, self.structured_outputs):
            yield from () if part is None else part.parts()

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Validate a JSON body.

        Raises:
            InvalidRequest: malformed JSON, wrong type, value out of range, unknown or unsupported field.
        """
        request = parse_body(cls, body)
        for name, neutral in cls.NEUTRAL.items():
            if (value := getattr(request, name)) is not None and value not in neutral:
                raise InvalidRequest(f"{name} is not supported by this server; leave it out", param=name)
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        request.check_together()
        return request

    def check_together(self) -> None:
        """Reject fields that contradict each other, or need a field that is missing.

        Raises:
            InvalidRequest: `param` names the field.
        """
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        _ = self.output_constraint

    def value(self, name: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Return the field's value. If missing or null, return the value in `defaults`, else the field's default."""
        if name in self.model_fields_set and (given := getattr(self, name)) is not None:
            return given
        return defaults.get(name, type(self).model_fields[name].default)

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def output_constraint(self) -> OutputConstraint | None:
        """Return the required output format; None for free text. Raises InvalidRequest: see `structured.formats`."""
        return output_constraint(self.response_format, self.structured_outputs)

    @property
    def num_samples(self) -> int:
        """Return how many completions are computed per prompt."""
        number: int = self.value("n")
        return number

    @property
    def chooses(self) -> bool:
        """Report whether completions are ranked by likelihood, and perhaps not all returned."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of top logprobs per completion token; None: no logprobs."""
        return None

    @property
    def echoes(self) -> bool:
        """Report whether the response repeats the prompt before the completion."""
        return False


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "suffix": ("",),
    }

    prompt: Annotated[
        str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)],
        Field(description=f"a string, token ids, or a list of up to {MAX_PROMPTS} of either"),
    ]
    max_tokens: Count | None = 16
    echo: bool | None = False
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None

    def check_together(self) -> None:
        """See `GenerationRequest`. `best_of` cannot be streamed: the ranking needs all completions finished."""
        super().check_together()
        if self.num_samples < self.value("n"):
            raise InvalidRequest(f"best_of={self.best_of} is under n={self.value('n')}; raise best_of", param="best_of")
        if self.stream and self.chooses:
            raise InvalidRequest(f"best_of={self.best_of} cannot be streamed; leave out stream", param="best_of")

    @property
    def num_samples(self) -> int:
        """See `GenerationRequest`."""
        return super().num_samples if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """See `GenerationRequest`. Without streaming, `best_of` ranks even if all completions are returned."""
        return self.num_samples > (super().num_samples if self.stream else 1) and self.best_of is not None

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """See `GenerationRequest`."""
        return bool(self.echo)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts as a list, in order.

        Raises:
            InvalidRequest: the list is empty, or a prompt is empty.
        """
        prompts: Sequence[str | list[int]]
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            prompts = [self.prompt]
        else:
            prompts = self.prompt  # type: ignore[assignment]
        if not prompts or not all(prompts):
            raise InvalidRequest("prompt must not be empty", param="prompt")
        return prompts


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    tokens: TokenIds
    model: str | None = None


def parse_body(model: type[Model], body: bytes) -> Model:
    """Validate a JSON body against a request model.

    Raises:
        InvalidRequest: the first error in the body, with its field.
    """
    try:
        request = model.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error, model, body) from None
    for place, part in request.parts():
        if part.model_extra:
            name = place + next(iter(part.model_extra))[:100]
            raise InvalidRequest(f"unknown field: {name}", param=name)
    return request


# Error messages for union types, for which pydantic reports one error per branch.
_UNIONS = {
    "prompt": f"must be a string, a list of strings, token ids, or a list of token-id lists, up to {MAX_PROMPTS}",
    "stop": f"must be a non-empty string, or a list of at most {MAX_STOPS} of them",
    "truncate_prompt_tokens": "must be a whole number from 1, or -1 for as many tokens as the context allows",
    "chat_template_kwargs": "must be true, false, a number, a string or null",
    "content": f'must be a string, or up to {MAX_PARTS} {{"type": "text", "text": …}}; this server reads text only',
}


def _name(place: tuple[int | str, ...]) -> str:
    """Return the name of an error's field, without the branch of a union ("stop.list[...].3")."""
    if place[0] in ("stream_options", "response_format", "structured_outputs"):
        depth = 3 if place[:2] == ("response_format", "json_schema") else 2
        return ".".join(map(str, place[:depth]))
    if place[0] == "chat_template_kwargs":
        return ".".join(str(part)[:100] for part in place[:2])
    if place[0] == "messages" and len(place) > 1:
        return f"messages[{place[1]}]" + "".join(f".{part}" for part in place[2:3])
    return str(place[0])


def _explain(error: ValidationError, model: type[RequestModel], body: bytes) -> InvalidRequest:
    """Return pydantic's first error as one sentence that names the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, place = first["type"], first["loc"]
    if kind == "json_invalid":
        if not body.strip():
            return InvalidRequest("the body is empty; it must be a JSON object")
        return InvalidRequest(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not place:
        return InvalidRequest("the body must be a JSON object")
    name = _name(place)
    if kind == "missing":
        unknown = unknown_field(model.model_fields, body) if len(place) == 1 else None
        prefix = "" if unknown is None else f"unknown field: {unknown}; "
        return InvalidRequest(f"{prefix}{name} is required", param=name if unknown is None else unknown)
    wanted = _UNIONS.get(str(place[0]) if len(place) < 3 or place[0] != "messages" else str(place[2]))
    # An error directly at these fields does not come from a branch of their union.
    if len(place) == 1 and place[0] in ("prompt", "chat_template_kwargs"):
        wanted = None
    return InvalidRequest(f"{name} {reword(kind, first['msg']) if wanted is None else wanted}", param=name)
