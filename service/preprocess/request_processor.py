"""Conversion of a validated request body into sequences with token ids, sampling parameters and seeds."""

import dataclasses
import hashlib
import secrets
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import msgspec

from model.sampling.params import MAX_STOP_TOKEN_IDS, SamplingParams
from model.tokenizer.fill_in_middle import FillInMiddle, describe_formats, encode_continuation, find_fill_in_middle
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.ipc.messages import Submit, TokenLogprob
from service.preprocess.chat_renderer import ChatPlan
from service.preprocess.served_model import RequestDefaults
from service.protocol.chat import ChatCompletionRequest
from service.protocol.completions import CompletionRequest, GenerationRequest
from service.protocol.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from service.protocol.logprobs import prompt_text
from service.protocol.request_model import MAX_PROMPTS
from service.requests.adapters import AdapterRegistry
from service.requests.inflight import Choice

# A longer text, in characters, is tokenized in a thread: tiktoken encodes about 10 MB/s and releases the GIL.
MAX_INLINE_CHARACTERS = 50_000
_LONGEST_ID = 19  # digits; no vocabulary has longer ids
# Value of `truncate_prompt_tokens` that keeps as many tokens as fit.
_AS_MANY_AS_FIT = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestProcessor:
    """Converter of completion requests for one model into sequences for the engine.

    max_context_length: maximum tokens of a sequence, prompt and completion together.
    max_num_choices: maximum number of choices of one request, over all its prompts.
    aliases: further names that requests may give as `model`.
    adapters: LoRA adapters that requests may name as `model`.
    parse_special: parse the names of special tokens in texts as these tokens, unless a request sets the field.
    """

    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    max_num_choices: int
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    aliases: tuple[str, ...] = ()
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)
    max_prompts: int = MAX_PROMPTS
    parse_special: bool = True

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless `name` is the served model's name, an alias, an adapter's name or None."""
        self.adapter_key(name)

    def is_base(self, name: str | None) -> bool:
        """Return True if `name` is the served model's name, an alias or None."""
        return name is None or name == self.model_name or name in self.aliases

    def adapter_key(self, name: str | None) -> str:
        """Return the key of the adapter that a request names as its model; empty for the base model.

        Raises ModelNotFound if there is no such model.
        """
        if name is None or self.is_base(name):
            return ""
        if (adapter := self.adapters.find(name)) is None:
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}", param="model"
            )
        return adapter.key

    def response_name(self, name: str | None) -> str:
        """Return the model name for a response: `name` if it is an adapter's, else the served model's, not an alias."""
        return self.model_name if name is None or self.is_base(name) else name

    def plan(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        chat: ChatPlan | None = None,
        *,
        arrival_seconds: float,
        grammar: str | None = None,
    ) -> list[Choice]:
        """Convert a request that has passed `check` to choices: all samples of the first prompt, then of the next.

        Args:
            chat: prompt and parsing of a chat request; None for a request with prompts.
            grammar: compiled grammar of the request's output constraint; None without one.
        Raises an `ApiError` if a field does not fit the model or another field, or if a prompt is too long.
        """
        prompts: Iterable[str | list[int]] = [[] if chat is None else chat.token_ids]
        prompt_param = "messages"
        if isinstance(request, CompletionRequest):
            prompts, prompt_param = request.prompts, "prompt"
        elif not (chat and chat.token_ids):
            raise InvalidRequest.of("messages", ": the rendered prompt is empty; add text to a message")
        length_param, max_tokens, clause = self._asked_length(request)
        processor = self.parsing_special(getattr(request, "parse_special", None))
        encode = partial(
            processor.encode_prompt,
            param=prompt_param,
            # A completion without a length gets the rest of the context, so at least 1 token must fit.
            max_tokens=self.max_context_length - (1 if max_tokens is None or request.fits_context else max_tokens),
            num_kept=request.truncate_prompt_tokens,
            keeps_end=request.truncation_side != "right",
            clause=clause,
            length_param=prompt_param if max_tokens is None or request.fits_context else length_param,
        )
        shared = self._sampling_params(request, chat)
        if isinstance(request, CompletionRequest) and request.suffix:
            prompts, shared = self._fill_in_middle(request, request.suffix, shared)
        choices: list[Choice] = []
        for prompt in prompts:
            token_ids = tuple(encode(prompt))
            room = self.max_context_length - len(token_ids)
            length = min(max_tokens, room) if max_tokens is not None and request.fits_context else max_tokens
            params = dataclasses.replace(shared, max_tokens=self._length(len(token_ids), length, shared.min_tokens))
            _check_possible(params, self.tokenizer.eos_token_ids)
            submit = Submit(
                uid="",
                prompt_token_ids=token_ids,
                params=params,
                arrival_seconds=arrival_seconds,
                priority=request.value("priority"),
                cache_salt=request.cache_salt or "",
                grammar=grammar,
                adapter=self.adapter_key(request.model),
            )
            choices += processor._samples(
                *(request, prompt, submit, len(choices)), has_length=max_tokens is not None, chat=chat
            )
        return choices

    def _asked_length(self, request: CompletionRequest | ChatCompletionRequest) -> tuple[str, int | None, str]:
        """Return a request's maximum completion length: the field's name, its value, and a clause for an error.

        Without a value in the request, it is None if the checkpoint has a default, which `_length` applies; else it is
        the API's default, 16 for `/v1/completions` and None for a chat. The clause ends the error message about a
        prompt that leaves too little room for the completion.
        """
        is_new = isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None
        param = "max_completion_tokens" if is_new else "max_tokens"
        max_tokens = asked = request.value(param, {param: None})
        if asked is None and self.defaults.max_new_tokens is None:
            max_tokens = request.value(param)
        if max_tokens is None or request.fits_context:
            return param, max_tokens, ", which leaves no room for a completion"
        return param, max_tokens, f" and max_tokens is {max_tokens}{', its default' if asked is None else ''}"

    def _fill_in_middle(
        self, request: CompletionRequest, suffix: str, params: SamplingParams
    ) -> tuple[Iterator[list[int]], SamplingParams]:
        """Return a request's prompts, as token ids joined with the suffix in the model's fill-in-the-middle format.

        Also return `params`, with the format's end tokens as stop tokens unless `ignore_eos` is set. Texts are encoded
        one by one, so none can become a token of the format. Raises InvalidRequest if the model has no such format.
        """
        form = find_fill_in_middle(self.tokenizer)
        if form is None:
            raise InvalidRequest.of(
                "suffix",
                f" needs a tokenizer with the tokens {describe_formats()}; this model's has none of these sets; "
                "leave out suffix",
            )

        suffix_ids = self._encode_beside_gap(suffix, "suffix", form)
        begin = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        if not params.ignore_eos:
            ends = tuple(dict.fromkeys((*params.stop_token_ids, *form.end_ids)))
            if len(ends) > MAX_STOP_TOKEN_IDS:
                raise InvalidRequest.of(
                    "stop_token_ids",
                    f" has {len(params.stop_token_ids)} ids, and suffix adds {len(form.end_ids)}, over "
                    f"the limit of {MAX_STOP_TOKEN_IDS}; give fewer stop_token_ids",
                )
            params = dataclasses.replace(params, stop_token_ids=ends)
        prompts = (
            prompt if isinstance(prompt, list) else self._encode_beside_gap(prompt, "prompt", form)
            for prompt in request.prompts
        )
        return (begin + form.join(prefix_ids, suffix_ids) for prefix_ids in prompts), params

    def _encode_beside_gap(self, text: str, param: str, form: FillInMiddle) -> list[int]:
        """Return the token ids of a prompt or suffix. Raises InvalidRequest if it is too long.

        Raises InvalidRequest too if the text has a token of the fill-in-the-middle format, which only the server adds.
        """
        if (at_least := self._least_tokens(text)) > self.max_context_length:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.max_context_length} tokens, but {param} has at least "
                f"{at_least} tokens; shorten {param}",
                param=param,
            )
        encode = self.tokenizer.encode if param == "prompt" else partial(encode_continuation, self.tokenizer)
        try:
            token_ids = encode(text)
        except TokenizerError as error:
            raise InvalidRequest(str(error), param=param) from None
        if (marker := next(filter(form.marker_ids.__contains__, token_ids), None)) is not None:
            message = f"{param} contains the token {form.marker_ids[marker]!r}, which only the server adds; remove it"
            raise InvalidRequest(message, param=param)
        return token_ids

    def _samples(
        self,
        request: GenerationRequest,
        prompt: str | list[int],
        submit: Submit,
        first: int,
        *,
        has_length: bool,
        chat: ChatPlan | None,
    ) -> list[Choice]:
        """Return the choices of one prompt, one per sample, with indices from `first`, all made from `submit`."""
        text, num_hidden = "", 0
        if request.echoes:
            num_hidden = self._num_hidden_tokens(request, prompt)
            if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
                text = prompt
            else:
                text = prompt_text(self.tokenizer, submit.prompt_token_ids, num_hidden=num_hidden)
        num_logprobs = (request.prompt_logprobs, request.num_logprobs if request.echoes else None)
        num_prompt_logprobs = max((number for number in num_logprobs if number is not None), default=None)
        logprobs = list[TokenLogprob]()
        constraint = request.output_constraint if chat is None else chat.constraint
        return [
            Choice(
                index=first + sample,
                prompt_index=first // request.num_samples,
                prompt_text=text,
                prompt_logprobs=logprobs,
                num_hidden_prompt_tokens=num_hidden,
                submit=msgspec.structs.replace(
                    submit,
                    uid=uuid.uuid4().hex,
                    params=dataclasses.replace(
                        submit.params,
                        seed=sample_seed(request.seed, sample),
                        # The first sample computes the prompt's logprobs for all samples.
                        prompt_logprobs=None if sample else num_prompt_logprobs,
                    ),
                ),
                has_requested_length=has_length,
                grammar_param=None if constraint is None else constraint.param,
            )
            for sample in range(request.num_samples)
        ]

    def _num_hidden_tokens(self, request: GenerationRequest, prompt: str | list[int]) -> int:
        """Return the number of tokens at the prompt's start whose special tokens `echo` leaves out.

        Of a prompt of token ids: all with `skip_special_tokens`, else 0. Of a string: 1 if the server puts the
        begin-of-text token before it, else 0, because the client wrote the names of special tokens in the string.
        """
        if not isinstance(prompt, str):
            return len(prompt) if request.value("skip_special_tokens") else 0
        bos_token_id = self.tokenizer.bos_token_id
        if bos_token_id is None:
            return 0
        return int(not (self.parse_special and prompt.startswith(self.tokenizer.format_token_name(bos_token_id))))

    def check(self, request: GenerationRequest) -> None:
        """Raise an `ApiError` for an unknown model, too many prompts or choices, or a token id out of vocabulary."""
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
        self.check_ids(list(_logit_bias(request)), "logit_bias")

    def check_num_prompts(self, num_prompts: int, param: str) -> None:
        """Raise InvalidRequest for more prompts in the field `param` than one request may have."""
        if num_prompts > self.max_prompts:
            raise InvalidRequest.of(
                param,
                f" has {num_prompts} prompts, over the limit of {self.max_prompts} per request; split the request",
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequest, with the first wrong id, if token ids in the field `param` are out of vocabulary."""
        size = self.tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequest.of(param, f": token id {wrong} is out of vocabulary; ids are 0 to {size - 1}")

    def parsing_special(self, asked: bool | None) -> Self:
        """Return a request processor with this value of `parse_special`; this processor if the value is None."""
        return self if asked is None else dataclasses.replace(self, parse_special=asked)

    def encode(self, text: str, *, begin: bool = True, param: str = "prompt") -> list[int]:
        """Return a text's token ids. Raises InvalidRequest on failure.

        begin: put the begin-of-text token before the text, unless the text begins with it.
        """
        try:
            token_ids = self.tokenizer.encode(text, parse_special=self.parse_special)
        except TokenizerError as error:
            raise InvalidRequest(str(error), param=param) from None
        bos_token_id = self.tokenizer.bos_token_id
        has_bos = bos_token_id is None or token_ids[:1] == [bos_token_id]
        return [bos_token_id, *token_ids] if begin and not has_bos else token_ids  # type: ignore[list-item]

    def encode_prompt(
        self,
        prompt: str | list[int],
        param: str,
        *,
        max_tokens: int,
        limit: str = "",
        clause: str = "; shorten the prompt, or set truncate_prompt_tokens",
        length_param: str | None = None,
        num_kept: int | None = None,
        keeps_end: bool = True,
    ) -> list[int]:
        """Return a prompt's token ids, truncated to `num_kept` tokens unless it is None (see `truncate`).

        Args:
            max_tokens: maximum number of tokens of the prompt.
            limit, clause: beginning and end of the error message about a longer prompt.
            length_param: request field that this error names if the prompt alone fits the context, else `param`.

        Raises:
            ContextLengthExceeded: the prompt has more than `max_tokens` tokens.
            InvalidRequest: a token id is out of vocabulary, the tokenizer fails, or `num_kept` is over `max_tokens`.
        """
        limit = limit or f"this model's maximum context length is {self.max_context_length} tokens"
        num_special_tokens = 0
        if isinstance(prompt, str):
            # Skip the cost of tokenizing a text that cannot fit.
            at_least = self._least_tokens(prompt)
            if num_kept is None and at_least > self.max_context_length:
                raise ContextLengthExceeded(
                    f"{limit}, but the prompt has at least {at_least} tokens{clause}", param=param
                )
            token_ids = self.encode(prompt, param=param)
            num_special_tokens = int(self.tokenizer.bos_token_id is not None)
        else:
            self.check_ids(prompt, param)
            token_ids = prompt
        if num_kept is not None:
            token_ids = truncate(
                token_ids, num_kept, room=max_tokens, keeps_end=keeps_end, num_special_tokens=num_special_tokens
            )
        if (num_tokens := len(token_ids)) > max_tokens:
            named = length_param if length_param and num_tokens < self.max_context_length else param
            raise ContextLengthExceeded(f"{limit}, but the prompt has {num_tokens} tokens{clause}", param=named)
        return token_ids

    def _least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens, without tokenizing the text."""
        longest, num_bytes = self.tokenizer.longest_token, len(text.encode(errors="replace"))
        if longest is not None and num_bytes > longest * self.max_context_length:
            longest = max([longest, *(len(name.encode()) for name in self.tokenizer.special_tokens)])
        return 0 if longest is None else -(-num_bytes // longest)

    def _visible_token_ids(self, request: GenerationRequest, chat: ChatPlan | None) -> tuple[int, ...]:
        """Return the ids of the special tokens whose names are part of the completion's text."""
        if not request.value("skip_special_tokens"):
            return tuple(self.tokenizer.special_tokens.values())
        return () if chat is None else chat.visible_token_ids

    def _length(self, num_prompt_tokens: int, max_tokens: int | None, min_tokens: int) -> int:
        """Return the maximum tokens of a completion: `max_tokens` of the request, if it is not None.

        Else the rest of the context, or the checkpoint's default if that is lower. Raises InvalidRequest for a higher
        `min_tokens`.
        """
        if max_tokens is None:
            max_tokens = max(1, self.max_context_length - num_prompt_tokens)
            if self.defaults.max_new_tokens is not None:
                max_tokens = min(max_tokens, self.defaults.max_new_tokens)
        if min_tokens > max_tokens:
            message = f"min_tokens={min_tokens} is over max_tokens={max_tokens}; lower min_tokens"
            raise InvalidRequest(message, param="min_tokens")
        return max_tokens

    def _sampling_params(self, request: GenerationRequest, chat: ChatPlan | None) -> SamplingParams:
        """Return the sampling parameters for all prompts of a request. `plan` sets `max_tokens` for each prompt."""
        value, defaults = request.value, self.defaults.sampling
        return SamplingParams(
            max_tokens=value("min_tokens"),
            min_tokens=value("min_tokens"),
            temperature=value("temperature", defaults),
            top_k=max(0, value("top_k", defaults)),
            top_p=value("top_p", defaults),
            min_p=value("min_p", defaults),
            stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            include_stop_str_in_output=value("include_stop_str_in_output"),
            ignore_eos=value("ignore_eos"),
            logprobs=0 if request.num_logprobs is None and request.is_ranked else request.num_logprobs,
            presence_penalty=value("presence_penalty"),
            frequency_penalty=value("frequency_penalty"),
            repetition_penalty=value("repetition_penalty", defaults),
            logit_bias=tuple(_logit_bias(request).items()),
            allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
            bad_word_ids=_bad_word_ids(request.bad_words or (), self.tokenizer),
            visible_token_ids=self._visible_token_ids(request, chat),
        )


def truncate(
    token_ids: list[int], num_kept: int, *, room: int, keeps_end: bool = True, num_special_tokens: int = 0
) -> list[int]:
    """Return the last (`keeps_end`) or first `num_kept` tokens of a prompt, as in vLLM.

    Args:
        num_kept: number of tokens to keep; -1: as many as `room`.
        room: maximum tokens of the prompt. If under 1, the prompt is returned whole, and the caller rejects it.
        num_special_tokens: number of special tokens that the server put before the prompt. They are not cut.

    Raises:
        InvalidRequest: `num_kept` is over `room`.
    """
    if room < 1:
        return token_ids
    kept = room if num_kept == _AS_MANY_AS_FIT else num_kept
    if kept > room:
        raise InvalidRequest.of(
            "truncate_prompt_tokens",
            f"={kept} is over the {room} tokens that the context leaves for a prompt; "
            f"use {_AS_MANY_AS_FIT} to keep as many as fit",
        )
    if kept >= len(token_ids):
        return token_ids
    if not keeps_end or kept <= num_special_tokens:
        return token_ids[:kept]
    return token_ids[:num_special_tokens] + token_ids[len(token_ids) - kept + num_special_tokens :]


def sample_seed(seed: int | None, sample: int) -> int:
    """Return the 64-bit seed of sample number `sample` (from 0) of a prompt; random if the request's `seed` is None.

    Sample 0 gets the request's seed, so that the first completion does not depend on `n`.
    """
    if seed is None:
        return secrets.randbits(64)
    seed %= 2**64  # the API allows negative seeds
    if sample == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest(), "big")


def _logit_bias(request: GenerationRequest) -> dict[int, float]:
    """Return the field `logit_bias` with integer keys. Raises InvalidRequest for a key that is not a token id."""
    biases: dict[int, float] = {}
    for key, bias in (request.logit_bias or {}).items():
        # Only the canonical decimal form is accepted, lest two keys name the same token.
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID and str(int(key)) == key):
            raise InvalidRequest.of(
                "logit_bias", f': {key[:50]!r} is not a token id; write {{"id": bias}}, as in {{"42": -100}}'
            )
        biases[int(key)] = bias
    return biases


def _check_possible(params: SamplingParams, eos_token_ids: Iterable[int]) -> None:
    """Raise InvalidRequest if `bad_words` and `min_tokens` forbid every token of `allowed_token_ids` as the first."""
    if not params.allowed_token_ids or not params.max_tokens:
        return
    forbidden = {word[0] for word in params.bad_word_ids if len(word) == 1}
    if params.min_tokens:
        forbidden.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    if forbidden.issuperset(params.allowed_token_ids):
        raise InvalidRequest.of(
            "allowed_token_ids",
            ": all of these tokens are forbidden by bad_words, or would end the text before "
            "min_tokens; allow another token",
        )


def _bad_word_ids(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of the request field `bad_words`: one sequence per spelling, without duplicates.

    As in vLLM, a word has two spellings: with a leading space, as within a text, and without, as at a text's start.
    Raises InvalidRequest for a word that has no tokens or cannot be tokenized.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare.strip() else (word,):
            try:
                ids = tuple(tokenizer.encode(text))
            except TokenizerError as error:
                raise InvalidRequest.of("bad_words", f": {word!r} cannot be tokenized: {error}") from None
            if not ids:
                raise InvalidRequest.of("bad_words", f": {word!r} has no tokens; leave it out")
            found[ids] = None
    return tuple(found)
