"""Request processor: turns a validated request into sequences with token ids, limits and seeds."""

import dataclasses
import hashlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.ipc.messages import Submit, TokenLogprob
from service.preprocess.served_model import RequestDefaults
from service.preprocess.token_constraints import check_possible, logit_bias, token_rules
from service.preprocess.truncation import Truncation
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import MAX_PROMPTS, CompletionRequest, GenerationRequest
from service.protocol.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from service.protocol.logprobs import prompt_text
from service.requests.inflight import Choice

# Longer texts, in characters, are tokenized in a thread: tiktoken encodes about 10 MB/s and releases the GIL.
MAX_INLINE_CHARACTERS = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestProcessor:
    """Request processor for one model.

    max_context_length: maximum tokens of prompt and completion together.
    max_num_choices: maximum choices of one request, over all its prompts.
    defaults: values of fields that a request leaves out.
    aliases: further names of the model.
    max_prompts: maximum prompts of one request.
    """

    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    max_num_choices: int
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    aliases: tuple[str, ...] = ()
    max_prompts: int = MAX_PROMPTS

    def check_model(self, name: str | None) -> None:
        """Reject a request that names a model other than the served one. None means the served model.

        Raises:
            ModelNotFound: the name is neither the model's name nor an alias.
        """
        if name is not None and name != self.model_name and name not in self.aliases:
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}", param="model"
            )

    def plan(self, request: CompletionRequest, *, arrival_seconds: float) -> list[Choice]:
        """Return the choices of a completion request, ordered by prompt, then by sample.

        Raises:
            ModelNotFound: see `check_model`.
            InvalidRequest: a prompt, token id or limit is out of bounds.
        """
        prompts = request.prompts
        self.check(request, num_prompts=len(prompts))
        default_length: int = type(request).model_fields["max_tokens"].default
        asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
        wanted = default_length if asked is None and self.defaults.max_new_tokens is None else asked
        length_clause = _length_clause(wanted, is_asked=asked is not None)
        choices: list[Choice] = []
        rules = token_rules(request, self.tokenizer, self.defaults.sampling)
        for prompt in prompts:
            full_ids = self._prompt_ids(request, prompt, length_clause)
            token_ids = self._cut(
                request, full_ids, wanted, num_special_tokens=len(self._bos_token_ids) if isinstance(prompt, str) else 0
            )
            self._check_room(len(token_ids), wanted, "max_tokens", length_clause)
            max_tokens = self._default_length(token_ids) if wanted is None else wanted
            text = ""
            if request.echoes:
                is_whole = token_ids is full_ids
                text = prompt if isinstance(prompt, str) and is_whole else prompt_text(self.tokenizer, token_ids)
            params = self._sampling_params(request, max_tokens, rules)
            choices += self._choices(
                request, token_ids, params, first=len(choices), text=text, arrival_seconds=arrival_seconds
            )
        return choices

    def plan_chat(
        self, request: ChatCompletionRequest, token_ids: list[int], *, arrival_seconds: float
    ) -> list[Choice]:
        """Return the choices of a chat request, one per sample. Call `check` first.

        Args:
            token_ids: the conversation, rendered and tokenized.

        Raises:
            InvalidRequest: the prompt is empty, or a token id or limit is out of bounds.
        """
        if not token_ids:
            raise InvalidRequest("messages: the rendered prompt is empty; add text to a message", param="messages")
        max_tokens, param = request.max_allowed_tokens, "messages"
        token_ids = self._cut(request, token_ids, max_tokens)
        if max_tokens is not None and len(token_ids) < self.max_context_length:
            param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        self._check_room(len(token_ids), max_tokens, param, _length_clause(max_tokens))
        if max_tokens is None:
            max_tokens = self._default_length(token_ids)
        rules = token_rules(request, self.tokenizer, self.defaults.sampling)
        params = self._sampling_params(request, max_tokens, rules)
        choices = self._choices(request, token_ids, params, first=0, text="", arrival_seconds=arrival_seconds)
        for choice in choices:
            choice.has_requested_length = request.max_allowed_tokens is not None
        return choices

    def check(self, request: GenerationRequest, *, num_prompts: int = 1) -> None:
        """Reject a request by the fields that can be checked without its prompt.

        Raises:
            ModelNotFound: see `check_model`.
            InvalidRequest: a token id is out of vocabulary, or there are too many prompts or choices.
        """
        self.check_model(request.model)
        self.check_num_prompts(num_prompts, "prompt")
        num_samples, param = request.num_samples, "best_of" if request.chooses else "n"
        if num_prompts * num_samples > self.max_num_choices:
            raise InvalidRequest(
                f"{num_prompts} prompts times {param}={num_samples} are {num_prompts * num_samples} completions, "
                f"over the limit of {self.max_num_choices}; lower {param} or send fewer prompts",
                param=param,
            )
        self.check_ids(request.stop_token_ids or [], "stop_token_ids")
        self.check_ids(request.allowed_token_ids or [], "allowed_token_ids")
        self.check_ids(list(logit_bias(request)), "logit_bias")

    def check_num_prompts(self, num_prompts: int, param: str) -> None:
        """Reject a request with more than `max_prompts` prompts.

        Raises:
            InvalidRequest: there are more.
        """
        if num_prompts > self.max_prompts:
            raise InvalidRequest(
                f"{param} holds {num_prompts} prompts, this server takes {self.max_prompts} in one request; "
                "split the request",
                param=param,
            )

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Return the token ids of a text prompt.

        Args:
            begin: prepend the begin-of-text token, if the tokenizer has one.

        Raises:
            InvalidRequest: the tokenizer cannot encode the text.
        """
        try:
            return [*(self._bos_token_ids if begin else ()), *self.tokenizer.encode(text)]
        except TokenizerError as error:
            raise InvalidRequest(str(error), param="prompt") from None

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on a text's tokens from its length; 0 if the tokenizer has no longest token."""
        longest = self.tokenizer.longest_token
        return 0 if longest is None else -(-len(text.encode(errors="replace")) // longest)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Reject token ids outside the vocabulary.

        Raises:
            InvalidRequest: the message has the first such id.
        """
        size = self.tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is out of vocabulary; ids are 0 to {size - 1}", param=param
            )

    @property
    def _bos_token_ids(self) -> tuple[int, ...]:
        """Return the token ids put before a text prompt: the begin-of-text token, or nothing."""
        return () if self.tokenizer.bos_token_id is None else (self.tokenizer.bos_token_id,)

    def _cut(
        self, request: GenerationRequest, token_ids: list[int], max_tokens: int | None, *, num_special_tokens: int = 0
    ) -> list[int]:
        """Return a prompt, truncated if the request asks for truncation.

        Args:
            max_tokens: completion tokens that must fit after the prompt; None counts as 1, since the completion then
                gets the rest of the context.
            num_special_tokens: see `Truncation.cut`.

        Raises:
            InvalidRequest: see `Truncation.cut`.
        """
        truncation = Truncation.of(request)
        if truncation is None:
            return token_ids
        room = self.max_context_length - (1 if max_tokens is None else max_tokens)
        return truncation.cut(token_ids, room=room, num_special_tokens=num_special_tokens)

    def _default_length(self, token_ids: list[int]) -> int:
        """Return `max_tokens` of a request without one: the checkpoint's default, capped by the rest of the context."""
        room = max(1, self.max_context_length - len(token_ids))
        return room if self.defaults.max_new_tokens is None else min(room, self.defaults.max_new_tokens)

    def _choices(
        self,
        request: GenerationRequest,
        token_ids: list[int],
        params: SamplingParams,
        *,
        first: int,
        text: str,
        arrival_seconds: float,
    ) -> list[Choice]:
        """Return the samples of one prompt. Only the first sample computes the prompt's logprobs, for all samples.

        Args:
            first: index of the first sample among the request's choices.
            text: prompt text that each sample echoes; empty without `echo`.
        """
        num_samples, scores = request.num_samples, list[TokenLogprob]()
        return [
            Choice(
                index=first + sample,
                prompt_index=first // num_samples,
                prompt_text=text,
                prompt_logprobs=scores,
                submit=Submit(
                    uid=uuid.uuid4().hex,
                    attempt=0,
                    prompt_token_ids=tuple(token_ids),
                    prior_token_ids=(),
                    params=dataclasses.replace(
                        params,
                        seed=sample_seed(request.seed, sample),
                        prompt_logprobs=None if sample else _num_prompt_logprobs(request),
                    ),
                    arrival_seconds=arrival_seconds,
                    deadline_seconds=None,
                    priority=request.value("priority"),
                    cache_salt=request.cache_salt or "",
                ),
            )
            for sample in range(num_samples)
        ]

    def _sampling_params(self, request: GenerationRequest, max_tokens: int, rules: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters shared by the samples of a prompt. `rules`: see `token_rules`."""
        defaults = self.defaults.sampling
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=request.value("temperature", defaults),
                top_k=max(0, request.value("top_k", defaults)),
                top_p=request.value("top_p", defaults),
                min_p=request.value("min_p", defaults),
                min_tokens=request.value("min_tokens"),
                stop=request.stops,
                stop_token_ids=tuple(request.stop_token_ids or ()),
                include_stop_str_in_output=request.value("include_stop_str_in_output"),
                ignore_eos=request.value("ignore_eos"),
                logprobs=0 if request.num_logprobs is None and request.chooses else request.num_logprobs,
                **rules,
            )
        except ValueError as error:  # min_tokens over max_tokens; each field was validated alone
            raise InvalidRequest(str(error), param="min_tokens") from None
        check_possible(params, self.tokenizer.eos_token_ids)
        return params

    def _prompt_ids(self, request: GenerationRequest, prompt: str | list[int], length_clause: str) -> list[int]:
        if isinstance(prompt, str):
            # Skip the cost of tokenizing a text that cannot fit.
            at_least = self.least_tokens(prompt)
            if at_least > self.max_context_length and request.truncate_prompt_tokens is None:
                raise self._over_context(f"at least {at_least}", length_clause, "prompt")
            return self.encode(prompt)
        self.check_ids(prompt, "prompt")
        return prompt

    def _check_room(self, num_prompt_tokens: int, max_tokens: int | None, param: str, length_clause: str) -> None:
        """Reject a prompt that leaves too little context for the completion.

        Args:
            max_tokens: completion tokens that must fit after the prompt; None counts as 1.
            length_clause: end of the error message, see `_length_clause`.
        """
        if num_prompt_tokens + (1 if max_tokens is None else max_tokens) > self.max_context_length:
            fits = param != "max_tokens" or num_prompt_tokens < self.max_context_length
            raise self._over_context(str(num_prompt_tokens), length_clause, param if fits else "prompt")

    def _over_context(self, num_prompt_tokens: str, length_clause: str, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"this model's maximum context length is {self.max_context_length} tokens, "
            f"but the prompt has {num_prompt_tokens}{length_clause}",
            param=param,
        )


def _length_clause(max_tokens: int | None, *, is_asked: bool = True) -> str:
    """Return the end of a context-length error, after the prompt's length."""
    if max_tokens is None:
        return ", which leaves no room for a completion"
    return f" and max_tokens is {max_tokens}{'' if is_asked else ', its default'}"


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    """Return the number of top logprobs to compute per prompt token; None: no prompt logprobs are needed."""
    wanted = (request.prompt_logprobs, request.num_logprobs if request.echoes else None)
    return max((number for number in wanted if number is not None), default=None)


def sample_seed(seed: int | None, sample: int) -> int:
    """Return the 64-bit seed of sample number `sample` of a request.

    Sample 0 gets the request's seed, so its completion does not depend on `n`. Later samples get a hash of the seed and
    the sample number. Without a seed, every sample gets a random seed.
    """
    if seed is None:
        return secrets.randbits(64)
    seed %= 2**64  # the API allows negative seeds
    if sample == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest(), "big")
