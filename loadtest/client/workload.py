"""Workloads of a load test: seeded sequences of completion requests, with prompts cut from Grimm's tales.

Request number i depends only on the workload's spec and i. Prompt lengths are approximate, since words are not cut.
"""

import argparse
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from loadtest.measurement.benchmark_program import add_options, described, options_of

TALES_PATH = Path(__file__).with_name("tales.txt")
# Tokens of a prompt beyond its wanted length: its first word lacks a space, and a special token may come first.
_PROMPT_SLACK = 4
NUM_PREFIXES, PREFIX_SHARE = 4, 0.75


class WorkloadKind(StrEnum):
    """Distribution of prompt and completion lengths in a workload."""

    FIXED = "fixed"  # all prompts and all completions have one length
    LOGNORMAL = "lognormal"  # lognormal around the given medians, like production traces
    SHARED_PREFIX = "shared-prefix"  # three quarters of a prompt are one of four prefixes
    MIXED = "mixed"  # chat, long prompts, long completions and shared prefixes together


class ClientKind(StrEnum):
    """Behaviour of a load-test client while it receives a response."""

    STREAMING = "streaming"
    WHOLE = "whole"  # does not stream
    CANCELLING = "cancelling"  # streams, and disconnects before the end


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """Settings of a workload: lengths, behaviour of clients, sampling and seed.

    prompt_tokens, output_tokens: length of each prompt and completion; lognormal: the median; mixed: the base length.
    sigma: standard deviation of the logarithm of lengths; with 0.6, p95 is 2.7 times the median.
    whole_share, cancelling_share: shares of requests with a client of that kind; all other clients stream to the end.
    """

    kind: WorkloadKind = WorkloadKind.FIXED
    prompt_tokens: int = described(64, "approximate number of tokens in a prompt")
    output_tokens: int = described(64, "number of tokens in a completion")
    sigma: float = described(0.6, "standard deviation of the logarithm of lengths, if lognormal")
    whole_share: float = described(0.0, "share of requests without streaming, from 0 to 1")
    cancelling_share: float = described(0.0, "share of requests whose client disconnects early, from 0 to 1")
    max_context_tokens: int = 512
    temperature: float = described(1.0, "sampling temperature")
    ignore_eos: bool = True
    seed: int = described(0, "seed of the requests and of their arrival times")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """One request to `/v1/completions`, and the behaviour of its client.

    cancel_after: number of chunks after which the client disconnects; None: it reads the whole response.
    return_token_ids: request token ids, so that each token is sent as an event, even if it ends within a character.
    expected: text of a correct completion; None: any text.
    """

    path: ClassVar[str] = "/v1/completions"
    index: int
    prompt: str | Sequence[int | str]
    max_tokens: int
    client: ClientKind = ClientKind.STREAMING
    cancel_after: int | None = None
    temperature: float = 1.0
    ignore_eos: bool = True
    seed: int = 0
    return_token_ids: bool = False
    expected: str | None = None

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request. `model` None: the body names no model, and the service uses its own."""
        names = ("prompt", "max_tokens", "temperature", "ignore_eos", "seed")
        body = ({} if model is None else {"model": model}) | {name: getattr(self, name) for name in names}
        if self.client is not ClientKind.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}  # `usage` has the exact token counts
        return body | ({"return_token_ids": True} if self.return_token_ids else {})


class ChatRequest(LoadRequest):
    """Request to `/v1/chat/completions`. `prompt` is the texts of a conversation, of user and assistant by turns."""

    path = "/v1/chat/completions"

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body of the request, as `LoadRequest.body`."""
        body, roles = LoadRequest.body(self, model), itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, body.pop("prompt"), strict=False)]
        return body | {"messages": messages}


class Passages:
    """Tokenized text, from which `cut` takes passages of a requested number of tokens that end with whole words.

    overshoot: largest ratio of a passage's real number of tokens to the requested number; 1 if `token_strs` is exact.
    Raises `ValueError` if the token strings do not spell the text, or if the text has fewer than 100 words.
    """

    def __init__(self, text: str, token_strs: Sequence[str], *, overshoot: float = 1.0) -> None:
        ends = [0, *itertools.accumulate(map(len, token_strs))]
        self._words, self._word_tokens, place = text.split(), list[int](), 0
        count = len(self._words)
        if ends[-1] != len(text) or count < 100:
            raise ValueError(f"the tokens have {ends[-1]} characters, and the text {len(text)} in {count} words")
        for word in self._words:
            end = text.index(word, place) + len(word)
            self._word_tokens.append(bisect_right(ends, end) - bisect_right(ends, place))
            place = end
        self.overshoot = overshoot
        # Coprime to the number of words, so that no two passages begin alike, as the prefix cache would notice.
        self._stride = next(step for step in range(int(count * 0.618), count) if math.gcd(step, count) == 1)

    def cut(self, start: int, num_tokens: int) -> str:
        """Return passage number `start` (any integer): whole words, at least one, of at most `num_tokens` tokens."""
        count = len(self._words)
        at = (start * self._stride) % count
        chosen, length = [self._words[at]], self._word_tokens[at] + 1  # a cut may split one more token
        while len(chosen) < count:
            place = (at + len(chosen)) % count
            length += self._word_tokens[place]
            if length > num_tokens:
                break
            chosen.append(self._words[place])
        return " ".join(chosen)


def tales() -> str:
    """Return Grimm's tales with single spaces between words: the text from which all prompts are cut."""
    return " ".join(TALES_PATH.read_text(encoding="utf-8").split())


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Return random token ids, which no prefix cache holds. The vocabulary's last id, possibly EOS, is excluded."""
    return [rng.randrange(vocab_size - 1) for _ in range(num_tokens)]


class Workload:
    """Endless sequence of load-test requests."""

    def __init__(self, spec: WorkloadSpec, passages: Passages) -> None:
        self.spec = spec
        self.passages = passages
        # Number of the first passage. Neighbouring seeds get distant numbers.
        self._origin = random.Random(spec.seed).randrange(1 << 30)

    def request(self, index: int) -> LoadRequest:
        """Return request number `index` of the workload: always the same request for the same number."""
        spec = self.spec
        rng = random.Random((spec.seed << 32) + index)
        prompt, output, prefix = self._lengths(rng)
        output = min(output, spec.max_context_tokens // 2)
        room = int((spec.max_context_tokens - output - _PROMPT_SLACK) / self.passages.overshoot)
        client, cancel_after, share = ClientKind.STREAMING, None, rng.random()
        if share < spec.whole_share:
            client = ClientKind.WHOLE
        elif share < spec.whole_share + spec.cancelling_share:
            client, cancel_after = ClientKind.CANCELLING, rng.randint(1, max(1, output // 2))
        return LoadRequest(
            index=index,
            prompt=self._prompt(index, prefix, max(1, min(prompt, room))),
            max_tokens=output,
            client=client,
            cancel_after=cancel_after,
            temperature=spec.temperature,
            ignore_eos=spec.ignore_eos,
            seed=rng.randrange(1 << 31),
        )

    def _lengths(self, rng: random.Random) -> tuple[int, int, int | None]:
        """Return the number of prompt tokens, of completion tokens, and the index of the shared prefix (None: none)."""
        kind, prompt, output = self.spec.kind, self.spec.prompt_tokens, self.spec.output_tokens
        if kind is WorkloadKind.MIXED:
            part = rng.random()
            if 0.4 <= part < 0.6:  # a long prompt, a short completion
                return 4 * prompt, max(1, output // 4), None
            if 0.6 <= part < 0.8:  # a short prompt, a long completion
                return max(1, prompt // 4), 2 * output, None
            kind = WorkloadKind.LOGNORMAL if part < 0.4 else WorkloadKind.SHARED_PREFIX
        if kind is WorkloadKind.LOGNORMAL:
            sigma = self.spec.sigma
            prompt, output = (max(1, round(rng.lognormvariate(math.log(m), sigma))) for m in (prompt, output))
        return prompt, output, rng.randrange(NUM_PREFIXES) if kind is WorkloadKind.SHARED_PREFIX else None

    def _prompt(self, index: int, prefix: int | None, num_tokens: int) -> str:
        own = self._origin + NUM_PREFIXES + index
        if prefix is None:
            return self.passages.cut(own, num_tokens)
        shared = max(1, round(num_tokens * PREFIX_SHARE))
        parts = [self.passages.cut(self._origin + prefix, shared)]
        if num_tokens > shared:
            parts.append(self.passages.cut(own, num_tokens - shared))
        return "\n".join(parts)


def add_workload_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add command-line options for the fields of `WorkloadSpec` to a parser."""
    kinds = [str(kind) for kind in WorkloadKind]
    add_options(parser, {"workload": (kinds[0], "distribution of prompt and completion lengths", kinds)})
    add_options(parser, options_of(WorkloadSpec))
    text = "let an end-of-text token end a completion before --output-tokens"
    add_options(parser, {"stop-at-end": (False, text)})
    text = "share of requests that repeat known questions; another answer is a failure, changed-answer"
    add_options(parser, {"canary-share": (0.02, text)})


def spec_from_arguments(arguments: argparse.Namespace) -> WorkloadSpec:
    """Return the workload settings in the parsed options of `add_workload_arguments`."""
    values = {name: getattr(arguments, name) for name in options_of(WorkloadSpec)}
    return WorkloadSpec(kind=WorkloadKind(arguments.workload), ignore_eos=not arguments.stop_at_end, **values)


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds from the start, without end: a Poisson process of `rate` requests per second."""
    rng = random.Random(seed)
    return itertools.accumulate(iter(lambda: rng.expovariate(rate), None))
