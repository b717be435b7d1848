"""A validated request becomes the sequences to compute: token ids, limits, seeds."""

import hashlib
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from model.sampling_params import SamplingParams
from model.tokenizer.interface import Tokenizer, TokenizerError
from service.journal import Choice
from service.logprobs import prompt_text
from service.messages import Submit
from service.schemas import CompletionRequest, ContextLengthExceeded, InvalidRequest, ModelNotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """What a request must fit.

    max_context_length: tokens of prompt and completion together.
    max_num_choices: choices that one request may ask for, over all its prompts.
    longest_token: bytes of the tokenizer's longest token.
    """

    tokenizer: Tokenizer
    model_name: str
    max_context_length: int
    max_num_choices: int
    longest_token: int

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not ours; none means ours.

        Raises:
            ModelNotFound: it is another one.
        """
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}")

    def plan(self, request: CompletionRequest, *, arrival_seconds: float) -> list[Choice]:
        """The request's choices, prompt by prompt, sample by sample.

        Raises:
            ModelNotFound: see `check_model`.
            InvalidRequest: a prompt, id or limit does not fit.
        """
        self.check_model(request.model)
        num_samples: int = request.value("n")
        prompts = request.prompts
        if len(prompts) * num_samples > self.max_num_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts times n={num_samples} are {len(prompts) * num_samples} completions, "
                f"more than the {self.max_num_choices} this server holds at once",
                param="n",
            )
        self.check_ids(request.stop_token_ids or [], "stop_token_ids")
        choices = []
        for prompt_index, prompt in enumerate(prompts):
            token_ids = self._prompt_ids(prompt, request.value("max_tokens"))
            text = prompt if isinstance(prompt, str) else prompt_text(self.tokenizer, prompt)
            for sample in range(num_samples):
                submit = Submit(
                    uid=uuid.uuid4().hex,
                    attempt=0,
                    prompt_token_ids=tuple(token_ids),
                    prior_token_ids=(),
                    params=_sampling_params(request, sample),
                    arrival_seconds=arrival_seconds,
                    deadline_seconds=None,
                )
                choices.append(
                    Choice(
                        index=prompt_index * num_samples + sample,
                        prompt_index=prompt_index,
                        prompt_text=text if request.echo else "",
                        submit=submit,
                    )
                )
        return choices

    def encode(self, text: str) -> list[int]:
        """Token ids of a text prompt, after the mark that begins a text if the tokenizer has one.

        Raises:
            InvalidRequest: the tokenizer cannot split it.
        """
        begin = self.tokenizer.bos_token_id
        try:
            return [*([] if begin is None else [begin]), *self.tokenizer.encode(text)]
        except TokenizerError as error:
            raise InvalidRequest(str(error), param="prompt") from None

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

    def _prompt_ids(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        if isinstance(prompt, str):
            # A text so long that no tokenization fits is refused before it costs one.
            at_least = -(-len(prompt.encode()) // self.longest_token)
            if at_least > self.max_context_length:
                raise self._over_context(f"at least {at_least}", max_tokens, "prompt")
            token_ids = self.encode(prompt)
        else:
            token_ids = prompt
            self.check_ids(token_ids, "prompt")
        if len(token_ids) + max_tokens > self.max_context_length:
            param = "max_tokens" if len(token_ids) < self.max_context_length else "prompt"
            raise self._over_context(str(len(token_ids)), max_tokens, param)
        return token_ids

    def _over_context(self, num_prompt_tokens: str, max_tokens: int, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"this model's context is {self.max_context_length} tokens, but the prompt has {num_prompt_tokens} "
            f"and max_tokens is {max_tokens}",
            param=param,
        )


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


def _sampling_params(request: CompletionRequest, sample: int) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=request.value("max_tokens"),
            temperature=request.value("temperature"),
            top_k=max(0, request.value("top_k")),
            top_p=request.value("top_p"),
            min_p=request.value("min_p"),
            seed=sample_seed(request.seed, sample),
            min_tokens=request.value("min_tokens"),
            stop=request.stops,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            include_stop_str_in_output=request.value("include_stop_str_in_output"),
            ignore_eos=request.value("ignore_eos"),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
    except ValueError as error:  # what two fields say together; each alone is in range by now
        raise InvalidRequest(str(error)) from None
