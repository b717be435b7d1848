"""Request bodies of `/v1/completions` and `/detokenize`, and the fields common to all completion requests."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from model.sampling import params
from service.protocol.errors import InvalidRequest
from service.protocol.request_model import (
    IGNORED,
    NUM_KEPT_ERROR,
    PROMPTS_ERROR,
    ParseSpecial,
    Prompts,
    RequestModel,
    TokenIds,
    Unsupported,
    split_prompts,
)
from service.protocol.response_format import (
    GUIDED,
    GuidedChoice,
    GuidedGrammar,
    GuidedRegex,
    OutputConstraint,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    guided_constraint,
)

# Each token's text is searched for every stop string, so stop strings are bounded.
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
NumLogprobs = Annotated[int, Field(ge=0, le=params.MAX_LOGPROBS)]
NumKept = Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)]
MAX_STOPS = 16
MAX_CHOICES = 128
SEED_RANGE = (-(2**63), 2**64 - 1)
Penalty = Annotated[float, Field(ge=params.PENALTY_RANGE[0], le=params.PENALTY_RANGE[1])]
RepetitionPenalty = Annotated[float, Field(ge=params.REPETITION_RANGE[0], le=params.REPETITION_RANGE[1])]
LogitBias = Annotated[float, Field(ge=params.LOGIT_BIAS_RANGE[0], le=params.LOGIT_BIAS_RANGE[1])]
LogitBiases = Annotated[
    dict[str, LogitBias], Field(max_length=params.MAX_LOGIT_BIASES, description="number to add to a logit, by token id")
]
BadWord = Annotated[str, Field(min_length=1, max_length=100)]
Timeout = Annotated[float, Field(gt=0, le=86_400, description="maximum seconds that the request waits in the queue")]
# Limits starvation: a level is worth `AGEING_SECONDS` of waiting, and the whole range is 2,000 levels.
MAX_PRIORITY = 1000
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="lower values are served first")]


class StreamOptions(RequestModel):
    """Field `stream_options`. `include_usage`: send usage in a last event; `continuous_usage_stats`: in all events."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingRequest(RequestModel):
    """Fields that choose the tokens and the place in the queue, common to completions, chat and `/v1/responses`."""

    model: str | None = None
    min_tokens: Count | None = 0
    ignore_eos: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1: no limit")] | None = 0
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(ge=SEED_RANGE[0], le=SEED_RANGE[1])] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    presence_penalty: Penalty | None = 0.0
    frequency_penalty: Penalty | None = 0.0
    repetition_penalty: RepetitionPenalty | None = 1.0
    logit_bias: LogitBiases | None = None
    priority: Priority | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    timeout: Timeout | None = None
    user: str | None = None


class GenerationRequest(SamplingRequest):
    """Fields common to the bodies of completion and chat completion requests. A null field means its default."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        "prompt": PROMPTS_ERROR,
        "stop": f"must be a non-empty string, or a list of at most {MAX_STOPS} non-empty strings",
        "truncate_prompt_tokens": NUM_KEPT_ERROR,
    }

    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stop_token_ids: Annotated[TokenIds, Field(max_length=params.MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=params.MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=params.MAX_BAD_WORDS, fail_fast=True)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: NumKept | None = None
    truncation_side: Literal["left", "right"] | None = None
    skip_special_tokens: Annotated[bool | None, Field(description="false: special tokens add their names")] = True
    spaces_between_special_tokens: Annotated[bool | None, Field(description="no effect")] = True
    detokenize: Annotated[Any, Unsupported(True)] = None
    # Older fields of vLLM, which `structured_outputs` has replaced.
    guided_json: Schema | str | None = None
    guided_regex: GuidedRegex | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GuidedGrammar | None = None
    # Fields of beam search, which is not supported. Values that ask for no beam search are accepted.
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    length_penalty: Annotated[Any, Unsupported(1, 1.0)] = None
    early_stopping: IGNORED = None
    logprob_token_ids: Annotated[Any, Unsupported([])] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None
    # Fields of SGLang, which vllm-router and sglang-router add to each request.
    no_stop_trim: Annotated[Any, Unsupported(False, remedy="use include_stop_str_in_output")] = None
    return_hidden_states: Annotated[Any, Unsupported(False)] = None
    # Fields of OpenAI's, vLLM's, llama.cpp's and Ollama's clients that change nothing here.
    metadata: IGNORED = None
    safety_identifier: IGNORED = None
    prompt_cache_key: IGNORED = None
    prompt_cache_retention: IGNORED = None
    prompt_cache_options: IGNORED = None
    request_id: IGNORED = None
    cache_prompt: IGNORED = None
    keep_alive: IGNORED = None
    id_slot: IGNORED = None
    timings_per_token: IGNORED = None
    return_progress: IGNORED = None
    guided_decoding_backend: IGNORED = None
    guided_whitespace_pattern: Annotated[Any, Unsupported()] = None

    def check_fields(self) -> None:
        """Raise InvalidRequest for a field that needs another field, and for an invalid output constraint."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest.of("stream_options", " needs stream: true; set stream, or leave out stream_options")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise InvalidRequest.of("truncation_side", " needs truncate_prompt_tokens")
        _ = self.output_constraint

    def value(self, name: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Return a field's value. If it is missing or null, return its default in `defaults`, else in the class."""
        # Pydantic's `model_fields` and `model_fields_set` are properties that cost more than the rest of this method.
        if name in self.__pydantic_fields_set__ and (given := getattr(self, name)) is not None:
            return given
        return defaults.get(name, type(self).__pydantic_fields__[name].default)

    @property
    def output_constraint(self) -> OutputConstraint | None:
        """Output format of completions; None: any text. Raises InvalidRequest if it is invalid, or given twice."""
        wanted = None if self.response_format is None else self.response_format.constraint()
        given = sorted(GUIDED.keys() & self.__pydantic_fields_set__)
        guided = {name: value for name in given if (value := getattr(self, name)) is not None}
        others = list(guided) if self.structured_outputs is None else ["structured_outputs", *guided]
        if not others:
            return wanted
        if wanted is not None or len(others) > 1:
            names = ["response_format"] * (wanted is not None) + others
            raise InvalidRequest(f"give only one of {' and '.join(names)}", param=others[0])
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint()
        return guided_constraint(others[0], guided[others[0]])

    @property
    def num_samples(self) -> int:
        """Number of completions to compute per prompt: `best_of` if it is set, else `n`."""
        return int(self.value("n"))

    @property
    def is_ranked(self) -> bool:
        """True if, by `best_of`, completions are ranked by likelihood and the `n` most likely are returned."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to list per completion token; 0: only the token itself; None: no logprobs."""
        return None

    @property
    def fits_context(self) -> bool:
        """True if a maximum length beyond the context is lowered to the rest of the context, instead of an error."""
        return False

    @property
    def echoes(self) -> bool:
        """True if the response repeats the prompt before the completion."""
        return bool(getattr(self, "echo", False))


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Count | None = 16
    echo: bool | None = False
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    parse_special: ParseSpecial = None
    suffix: Annotated[str | None, Field(description="text after the completion, for models with FIM tokens")] = None

    def check_fields(self) -> None:
        """Raise InvalidRequest for `best_of` below `n` or in a stream, and for fields that `suffix` excludes."""
        super().check_fields()
        if self.num_samples < self.value("n"):
            raise InvalidRequest.of("best_of", f"={self.best_of} is under n={self.value('n')}; raise best_of")
        if self.stream and self.is_ranked:
            raise InvalidRequest.of("best_of", f"={self.best_of} cannot be streamed; leave out stream")
        if self.suffix and self.echo:
            raise InvalidRequest.of("echo", " cannot be used with suffix; leave out echo")
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise InvalidRequest.of("truncate_prompt_tokens", " cannot be used with suffix; shorten prompt and suffix")

    @property
    def num_samples(self) -> int:
        return super().num_samples if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        # Without streaming, completions are ranked even if all of them are returned.
        return self.num_samples > (super().num_samples if self.stream else 1) and self.best_of is not None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts of a completion request, in order. Raises InvalidRequest for an empty list or an empty prompt.

        Before a suffix, an empty prompt is allowed.
        """
        return split_prompts(self.prompt, "prompt", can_be_empty=bool(self.suffix))


class DetokenizeRequest(RequestModel):
    """Body of `POST /detokenize`."""

    tokens: TokenIds
    model: str | None = None
