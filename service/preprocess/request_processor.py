"""Request processor: turns a validated request into sequences with token ids, limits and seeds."""

import dataclasses
import hashlib
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from model.sampling.params import SamplingParams
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.ipc.messages import Submit, TokenLogprob
from service.preprocess.served_model import RequestDefaults
from service.preprocess.token_constraints import check_possible, logit_bias, token_rules
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest, GenerationRequest
from service.protocol.errors import ApiError, ContextLengthExceeded, InvalidRequest, ModelNotFound
from service.protocol.logprobs import prompt_text
from service.protocol.request_model import MAX_PROMPTS
from service.requests.inflight import Choice

# Longer texts, in characters, are tokenized in a thread: tiktoken encodes about 10 MB/s and releases the GIL.
MAX_INLINE_CHARACTERS = 50_000
# Value of `truncate_prompt_tokens` that keeps as many tokens as fit.
_AS_MANY_AS_FIT = -1


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
        """Raise ModelNotFound for a name that is neither the model's name nor an alias. None: the served model."""
        if name is not None and name != self.model_name and name not in self.aliases:
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}", param="model"
            )

    def plan(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        conversation_ids: list[int] | None = None,
        *,
        arrival_seconds: float,
        grammar: str | None = None,
    ) -> list[Choice]:
        """Return the choices of a request that has passed `check`, ordered by prompt, then by sample.

        Args:
            conversation_ids: the tokenized conversation of a chat request.
            grammar: the compiled grammar of the request's output constraint.

        Raises:
            InvalidRequest: a prompt, token id or limit is out of bounds.
        """
        prompts: Sequence[str | list[int]]
        if isinstance(request, CompletionRequest):
            prompts, prompt_param, length_param = request.prompts, "prompt", "max_tokens"
            asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
            max_tokens = asked
            if asked is None and self.defaults.max_new_tokens is None:
                max_tokens = request.value("max_tokens")
        else:
            if not conversation_ids:
                raise InvalidRequest("messages: the rendered prompt is empty; add text to a message", param="messages")
            prompts, prompt_param = [conversation_ids], "messages"
            length_param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
            max_tokens = asked = request.max_allowed_tokens
        # A completion without a length gets the rest of the context, so at least 1 token must fit.
        num_reserved = 1 if max_tokens is None else max_tokens
        too_long = partial(
            self._over_context,
            max_tokens=max_tokens,
            is_default=asked is None,
            prompt_param=prompt_param,
            length_param=length_param,
        )
        encode = partial(
            self.encode_prompt,
            param=prompt_param,
            max_tokens=self.max_context_length - num_reserved,
            num_kept=request.truncate_prompt_tokens,
            keeps_end=request.truncation_side != "right",
            too_long=too_long,
        )
        choices: list[Choice] = []
        rules = token_rules(request, self.tokenizer, self.defaults.sampling)
        for prompt in prompts:
            first = len(choices)
            choices += self._samples(request, prompt, encode, max_tokens, rules, grammar, first, arrival_seconds)
        return choices

    def _samples(
        self,
        request: GenerationRequest,
        prompt: str | list[int],
        encode: Callable[[str | list[int]], list[int]],
        max_tokens: int | None,
        rules: dict[str, Any],
        grammar: str | None,
        first: int,
        arrival_seconds: float,
    ) -> list[Choice]:
        """Return the samples of one prompt, with choice indices from `first`."""
        token_ids = tuple(encode(prompt))
        params = self._sampling_params(request, self._length(len(token_ids), max_tokens), rules)
        text = ""
        if request.echoes:
            is_whole = isinstance(prompt, str) and request.truncate_prompt_tokens is None
            text = str(prompt) if is_whole else prompt_text(self.tokenizer, token_ids)
        num_logprobs = (request.prompt_logprobs, request.num_logprobs if request.echoes else None)
        num_prompt_logprobs = max((number for number in num_logprobs if number is not None), default=None)
        logprobs = list[TokenLogprob]()
        constraint = None if grammar is None else request.output_constraint
        return [
            Choice(
                index=first + sample,
                prompt_index=first // request.num_samples,
                prompt_text=text,
                prompt_logprobs=logprobs,
                submit=Submit(
                    uid=uuid.uuid4().hex,
                    attempt=0,
                    prompt_token_ids=token_ids,
                    prior_token_ids=(),
                    params=dataclasses.replace(
                        params,
                        seed=sample_seed(request.seed, sample),
                        # The first sample computes the prompt's logprobs for all samples.
                        prompt_logprobs=None if sample else num_prompt_logprobs,
                    ),
                    arrival_seconds=arrival_seconds,
                    deadline_seconds=None,
                    priority=request.value("priority"),
                    cache_salt=request.cache_salt or "",
                    grammar=grammar,
                ),
                has_requested_length=max_tokens is not None,
                grammar_param=None if constraint is None else constraint.param,
            )
            for sample in range(request.num_samples)
        ]

    def check(self, request: GenerationRequest) -> None:
        """Reject a request by the fields that can be checked without a prompt.

        Raises:
            ModelNotFound: the server has no model of this name.
            InvalidRequest: a token id is out of vocabulary, or there are too many prompts or choices.
        """
        self.check_model(request.model)
        num_prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
        self.check_num_prompts(num_prompts, "prompt")
        num_samples, param = request.num_samples, "best_of" if request.is_ranked else "n"
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
        """Raise InvalidRequest for a request with more than `max_prompts` prompts."""
        if num_prompts > self.max_prompts:
            raise InvalidRequest(
                f"{param} holds {num_prompts} prompts, this server takes {self.max_prompts} in one request; "
                "split the request",
                param=param,
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest with the first token id outside the vocabulary."""
        size = self.tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is out of vocabulary; ids are 0 to {size - 1}", param=param
            )

    def encode(self, text: str, *, begin: bool = True, param: str = "prompt") -> list[int]:
        """Return the token ids of a text. With `begin`, they begin with the begin-of-text token, if there is one.

        Raises:
            InvalidRequest: the tokenizer cannot encode the text of the field `param`.
        """
        try:
            token_ids = self.tokenizer.encode(text)
        except TokenizerError as error:
            raise InvalidRequest(str(error), param=param) from None
        bos_token_id = self.tokenizer.bos_token_id
        return token_ids if bos_token_id is None or not begin else [bos_token_id, *token_ids]

    def encode_prompt(
        self,
        prompt: str | list[int],
        param: str,
        *,
        max_tokens: int,
        too_long: Callable[[int, str], ApiError],
        num_kept: int | None = None,
        keeps_end: bool = True,
    ) -> list[int]:
        """Return a prompt's token ids, truncated if `num_kept` is set.

        Args:
            param: field that an error names.
            max_tokens: limit of the prompt's tokens.
            too_long: returns the error for a number of tokens over the limit, and a prefix of that number.
            num_kept, keeps_end: see `truncate`. None: no truncation.

        Raises:
            InvalidRequest: a token id is out of vocabulary, the text cannot be tokenized, or `num_kept` is too large.
            ApiError: the error of `too_long`.
        """
        if isinstance(prompt, str):
            longest = self.tokenizer.longest_token
            # Skip the cost of tokenizing a text that cannot fit.
            at_least = 0 if longest is None else -(-len(prompt.encode(errors="replace")) // longest)
            if num_kept is None and at_least > self.max_context_length:
                raise too_long(at_least, "at least ")
            token_ids = self.encode(prompt, param=param)
            num_special_tokens = int(self.tokenizer.bos_token_id is not None)
        else:
            self.check_ids(prompt, param)
            token_ids, num_special_tokens = prompt, 0
        if num_kept is not None:
            token_ids = truncate(
                token_ids, num_kept, room=max_tokens, keeps_end=keeps_end, num_special_tokens=num_special_tokens
            )
        if len(token_ids) > max_tokens:
            raise too_long(len(token_ids), "")
        return token_ids

    def _over_context(
        self,
        num_prompt_tokens: int,
        prefix: str,
        *,
        max_tokens: int | None,
        is_default: bool,
        prompt_param: str,
        length_param: str,
    ) -> ContextLengthExceeded:
        clause, param = ", which leaves no room for a completion", prompt_param
        if max_tokens is not None:
            clause = f" and max_tokens is {max_tokens}{', its default' if is_default else ''}"
            param = length_param if num_prompt_tokens < self.max_context_length else prompt_param
        return ContextLengthExceeded(
            f"this model's maximum context length is {self.max_context_length} tokens, "
            f"but the prompt has {prefix}{num_prompt_tokens}{clause}",
            param=param,
        )

    def _length(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the completion's maximum length: by default the checkpoint's, capped by the rest of the context."""
        if max_tokens is not None:
            return max_tokens
        room = max(1, self.max_context_length - num_prompt_tokens)
        return room if self.defaults.max_new_tokens is None else min(room, self.defaults.max_new_tokens)

    def _sampling_params(self, request: GenerationRequest, max_tokens: int, rules: dict[str, Any]) -> SamplingParams:
        defaults = self.defaults.sampling
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=request.value("temperature", defaults),
                top_k=max(0, request.value("top_k", defaults)),
                top_p=request.value("top_p", defaults),
                min_p=request.value("min_p", defaults),
                min_tokens=request.value("min_tokens"),
                stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                include_stop_str_in_output=request.value("include_stop_str_in_output"),
                ignore_eos=request.value("ignore_eos"),
                logprobs=0 if request.num_logprobs is None and request.is_ranked else request.num_logprobs,
                **rules,
            )
        except ValueError as error:  # min_tokens over max_tokens; each field was validated alone
            raise InvalidRequest(str(error), param="min_tokens") from None
        check_possible(params, self.tokenizer.eos_token_ids)
        return params


def truncate(
    token_ids: list[int], num_kept: int, *, room: int, keeps_end: bool = True, num_special_tokens: int = 0
) -> list[int]:
    """Return the kept tokens of a prompt, as in vLLM. A prompt that is short enough is returned unchanged.

    Args:
        num_kept: number of tokens to keep; -1: as many as fit.
        room: maximum tokens of a prompt. If under 1, nothing is cut, since no length would fit.
        keeps_end: keep the last tokens, else the first tokens.
        num_special_tokens: number of leading special tokens that the server added. They are kept first.

    Raises:
        InvalidRequest: `num_kept` is over `room`.
    """
    if room < 1:
        return token_ids
    kept = room if num_kept == _AS_MANY_AS_FIT else num_kept
    if kept > room:
        raise InvalidRequest(
            f"truncate_prompt_tokens={kept} is over the {room} tokens that the context leaves for a prompt; "
            f"use {_AS_MANY_AS_FIT} to keep as many as fit",
            param="truncate_prompt_tokens",
        )
    if kept >= len(token_ids):
        return token_ids
    if not keeps_end or kept <= num_special_tokens:
        return token_ids[:kept]
    return token_ids[:num_special_tokens] + token_ids[len(token_ids) - kept + num_special_tokens :]


def sample_seed(seed: int | None, sample: int) -> int:
    """Return the 64-bit seed of sample number `sample` of a request.

    Sample 0 gets the request's seed, so the first completion does not depend on `n`. Later samples get a hash of the
    seed and the sample number. Without a seed, every sample gets a random seed.
    """
    if seed is None:
        return secrets.randbits(64)
    seed %= 2**64  # the API allows negative seeds
    if sample == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest(), "big")
