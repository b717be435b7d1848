"""A validated request becomes the sequences to compute: token ids, limits, seeds."""

import dataclasses
import hashlib
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.sampling_params import SamplingParams
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.chat_schemas import ChatCompletionRequest
from service.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from service.live_request import Choice
from service.logprobs import prompt_text
from service.messages import Submit, TokenLogprob
from service.schemas import MAX_PROMPTS, CompletionRequest, GenerationRequest
from service.serving import Defaults
from service.token_rules import check_possible, logit_bias, token_rules
from service.truncation import Truncation

# Longer texts are tokenized in a thread: tiktoken works at about 10 MB/s and releases the interpreter's lock.
LONG_TEXT = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """What a request must fit.

    max_context_length: tokens of prompt and completion together.
    max_num_choices: choices that one request may ask for, over all its prompts.
    defaults: what a request gets where it says nothing.
    aliases: further names of the model.
    max_prompts: prompts of one request.
    """

    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    max_num_choices: int
    defaults: Defaults = field(default_factory=Defaults)
    aliases: tuple[str, ...] = ()
    max_prompts: int = MAX_PROMPTS

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not ours; none means ours.

        Raises:
            ModelNotFound: it is another one.
        """
        if name is not None and name != self.model_name and name not in self.aliases:
            raise ModelNotFound(
                f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}", param="model"
            )

    def plan(self, request: CompletionRequest, *, arrival_seconds: float) -> list[Choice]:
        """The request's choices, prompt by prompt, sample by sample.

        Raises:
            ModelNotFound: see `check_model`.
            InvalidRequest: a prompt, id or limit does not fit.
        """
        prompts = request.prompts
        self.check(request, num_prompts=len(prompts))
        standard: int = type(request).model_fields["max_tokens"].default
        asked = request.max_tokens if "max_tokens" in request.model_fields_set else None
        wanted = standard if asked is None and self.defaults.max_new_tokens is None else asked
        told = _told_length(wanted, is_asked=asked is not None)
        choices: list[Choice] = []
        rules = token_rules(request, self.tokenizer, self.defaults.sampling)
        for prompt in prompts:
            whole = self._prompt_ids(request, prompt, told)
            token_ids = self._cut(request, whole, wanted, num_marks=len(self._marks) if isinstance(prompt, str) else 0)
            self._check_room(len(token_ids), wanted, "max_tokens", told)
            max_tokens = self._default_length(token_ids) if wanted is None else wanted
            text = ""
            if request.echoes:
                is_whole = token_ids is whole
                text = prompt if isinstance(prompt, str) and is_whole else prompt_text(self.tokenizer, token_ids)
            params = self._sampling_params(request, max_tokens, rules)
            choices += self._choices(
                request, token_ids, params, first=len(choices), text=text, arrival_seconds=arrival_seconds
            )
        return choices

    def plan_chat(
        self, request: ChatCompletionRequest, token_ids: list[int], *, arrival_seconds: float
    ) -> list[Choice]:
        """The request's choices, sample by sample; `token_ids` is its conversation. `check` comes before.

        Raises:
            InvalidRequest: an id or limit does not fit.
        """
        if not token_ids:
            raise InvalidRequest("the messages are an empty prompt", param="messages")
        max_tokens, param = request.most_tokens, "messages"
        token_ids = self._cut(request, token_ids, max_tokens)
        if max_tokens is not None and len(token_ids) < self.max_context_length:
            param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        self._check_room(len(token_ids), max_tokens, param, _told_length(max_tokens))
        if max_tokens is None:
            max_tokens = self._default_length(token_ids)
        rules = token_rules(request, self.tokenizer, self.defaults.sampling)
        params = self._sampling_params(request, max_tokens, rules)
        choices = self._choices(request, token_ids, params, first=0, text="", arrival_seconds=arrival_seconds)
        for choice in choices:
            choice.has_asked_length = request.most_tokens is not None
        return choices

    def check(self, request: GenerationRequest, *, num_prompts: int = 1) -> None:
        """Refuse what can be refused without a prompt.

        Raises:
            ModelNotFound: see `check_model`.
            InvalidRequest: a token id is none, or there are more prompts or choices than this server holds.
        """
        self.check_model(request.model)
        self.check_num_prompts(num_prompts, "prompt")
        num_samples, param = request.num_samples, "best_of" if request.chooses else "n"
        if num_prompts * num_samples > self.max_num_choices:
            raise InvalidRequest(
                f"{num_prompts} prompts times {param}={num_samples} are {num_prompts * num_samples} completions, "
                f"more than the {self.max_num_choices} this server holds at once",
                param=param,
            )
        self.check_ids(request.stop_token_ids or [], "stop_token_ids")
        self.check_ids(request.allowed_token_ids or [], "allowed_token_ids")
        self.check_ids(list(logit_bias(request)), "logit_bias")

    def check_num_prompts(self, num_prompts: int, param: str) -> None:
        """Refuse more prompts than this server takes in one request.

        Raises:
            InvalidRequest: there are more.
        """
        if num_prompts > self.max_prompts:
            raise InvalidRequest(
                f"{param} holds {num_prompts} prompts, this server takes {self.max_prompts} in one request; "
                "send them in parts",
                param=param,
            )

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """Token ids of a text prompt, after the mark that begins a text if the tokenizer has one and `begin` is set.

        Raises:
            InvalidRequest: the tokenizer cannot split it.
        """
        try:
            return [*(self._marks if begin else ()), *self.tokenizer.encode(text)]
        except TokenizerError as error:
            raise InvalidRequest(str(error), param="prompt") from None

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least, by its length; 0 where its length says nothing."""
        longest = self.tokenizer.longest_token
        return 0 if longest is None else -(-len(text.encode(errors="replace")) // longest)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that the tokenizer does not know.

        Raises:
            InvalidRequest: names the first one.
        """
        size = self.tokenizer.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequest(
                f"{param}: token id {wrong} is out of vocabulary; ids are 0 to {size - 1}", param=param
            )

    @property
    def _marks(self) -> tuple[int, ...]:
        """What stands before a text prompt."""
        return () if self.tokenizer.bos_token_id is None else (self.tokenizer.bos_token_id,)

    def _cut(
        self, request: GenerationRequest, token_ids: list[int], max_tokens: int | None, *, num_marks: int = 0
    ) -> list[int]:
        """A prompt as long as the request wants it.

        Args:
            max_tokens: tokens that must fit beside it. None: the completion gets what is left, so that is one.
            num_marks: see `Truncation.cut`.

        Raises:
            InvalidRequest: see `Truncation.cut`.
        """
        truncation = Truncation.of(request)
        if truncation is None:
            return token_ids
        room = self.max_context_length - (1 if max_tokens is None else max_tokens)
        return truncation.cut(token_ids, room=room, num_marks=num_marks)

    def _default_length(self, token_ids: list[int]) -> int:
        """The most tokens of an answer whose length nobody asked for: the checkpoint's, within the context."""
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
        """The samples of one prompt. `first`: the first one's index; `text`: what each echoes.

        The first one scores the prompt for all.
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
        """What the samples of a prompt have in common. `rules`: see `token_rules`."""
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
        except ValueError as error:  # more min_tokens than max_tokens; each field alone is in range by now
            raise InvalidRequest(str(error), param="min_tokens") from None
        check_possible(params, self.tokenizer.eos_token_ids)
        return params

    def _prompt_ids(self, request: GenerationRequest, prompt: str | list[int], told: str) -> list[int]:
        if isinstance(prompt, str):
            # A text so long that no tokenization fits is refused before it costs one.
            at_least = self.least_tokens(prompt)
            if at_least > self.max_context_length and request.truncate_prompt_tokens is None:
                raise self._over_context(f"at least {at_least}", told, "prompt")
            return self.encode(prompt)
        self.check_ids(prompt, "prompt")
        return prompt

    def _check_room(self, num_prompt_tokens: int, max_tokens: int | None, param: str, told: str) -> None:
        """`max_tokens`: what must fit beside the prompt; None: what is left, so that is one. `told`: `_told_length`."""
        if num_prompt_tokens + (1 if max_tokens is None else max_tokens) > self.max_context_length:
            fits = param != "max_tokens" or num_prompt_tokens < self.max_context_length
            raise self._over_context(str(num_prompt_tokens), told, param if fits else "prompt")

    def _over_context(self, num_prompt_tokens: str, told: str, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"this model's maximum context length is {self.max_context_length} tokens, "
            f"but the prompt has {num_prompt_tokens}{told}",
            param=param,
        )


def _told_length(max_tokens: int | None, *, is_asked: bool = True) -> str:
    """How a refusal goes on that has named the prompt's length."""
    if max_tokens is None:
        return ", which leaves none for a completion"
    return f" and max_tokens is {max_tokens}{'' if is_asked else ', its default'}"


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    """Alternatives to the prompt's tokens that the engine must tell; None where nobody wants the prompt scored."""
    wanted = (request.prompt_logprobs, request.num_logprobs if request.echoes else None)
    return max((number for number in wanted if number is not None), default=None)


def sample_seed(seed: int | None, sample: int) -> int:
    """The seed of sample number `sample` of a request: 64 bits.

    The first sample has the request's own seed, so that it is the same whatever `n`; the others have hashes of
    it. Without a seed each has a random one.
    """
    if seed is None:
        return secrets.randbits(64)
    seed %= 2**64  # negative seeds are allowed on the wire
    if sample == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest(), "big")
