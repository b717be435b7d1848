"""Seeded workloads made of real text. Request number i is a pure function of (spec, i).

So two runs, or two clients that share a counter, send the same requests whatever their number and order.
Token counts are aims: prompts end at words, and a client outside the service has no tokenizer but the service's own;
`usage` says what a prompt really was, and reports use that.
"""

import argparse
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

TALES_PATH = Path(__file__).with_name("tales.txt")

# What a prompt may have beyond its aim even when the tokens of its text are known: its first word stands without
# the space before it, and a service may begin every prompt with a mark of its own.
PROMPT_SLACK = 4


class WorkloadKind(StrEnum):
    """The shape of the lengths."""

    FIXED = "fixed"  # every prompt and every answer of one length
    LOGNORMAL = "lognormal"  # lengths spread as production traces are, around the given medians
    SHARED_PREFIX = "shared-prefix"  # prompts that begin with one of a few long prefixes
    MIXED = "mixed"  # chat, long prompts, long answers and shared prefixes together


class ClientKind(StrEnum):
    """How the client behaves."""

    STREAMING = "streaming"
    WHOLE = "whole"  # waits for the whole answer
    CANCELLING = "cancelling"  # streams, and leaves before the end


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """A workload, completely described.

    prompt_tokens, output_tokens: the lengths (fixed), or their medians.
    sigma: spread of the lognormal lengths; 0.6 puts p95 at 2.7 times the median.
    num_prefixes, prefix_share: how many shared prefixes, and the part of a prompt that is prefix.
    whole_share, cancelling_share: shares of the clients; the rest stream to the end.
    max_context_tokens: prompt and answer together stay below it.
    ignore_eos: answers have the length asked for, so that runs compare.

    Raises:
        ValueError: a value is out of range.
    """

    kind: WorkloadKind = WorkloadKind.FIXED
    prompt_tokens: int = 64
    output_tokens: int = 64
    sigma: float = 0.6
    num_prefixes: int = 4
    prefix_share: float = 0.75
    whole_share: float = 0.0
    cancelling_share: float = 0.0
    max_context_tokens: int = 512
    temperature: float = 1.0
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("prefix_share", "whole_share", "cancelling_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.whole_share + self.cancelling_share > 1.0:
            raise ValueError("whole_share and cancelling_share together must not exceed 1")
        if self.sigma < 0.0:
            raise ValueError(f"sigma must not be negative, not {self.sigma}")
        if self.max_context_tokens < 8:
            raise ValueError(f"max_context_tokens must be at least 8, not {self.max_context_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One request to `/v1/completions`, and how its client behaves.

    `cancel_after` is the number of text chunks after which a cancelling client leaves, None for the others.
    """

    index: int
    prompt: str
    max_tokens: int
    client: ClientKind = ClientKind.STREAMING
    cancel_after: int | None = None
    temperature: float = 1.0
    ignore_eos: bool = True
    seed: int = 0

    def body(self, model: str | None) -> dict[str, Any]:
        """The JSON body; without a model the service takes its own. Streams ask for usage, which counts exactly."""
        body: dict[str, Any] = {
            **({} if model is None else {"model": model}),
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
        }
        if self.client is not ClientKind.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


class Passages:
    """A text from which passages of a number of tokens are cut, at words.

    Args:
        word_tokens: how many tokens each word has, the space before it included.
        overshoot: how many times longer than wished a passage may come out.

    Raises:
        ValueError: the text has fewer than 100 words.
    """

    def __init__(self, words: Sequence[str], word_tokens: Sequence[float], *, overshoot: float) -> None:
        if len(words) < 100:
            raise ValueError(f"a workload needs a text of at least 100 words, not {len(words)}")
        self._words = words
        self._word_tokens = word_tokens
        self.overshoot = overshoot
        # A stride coprime to the number of words visits every start once before any twice: no two passages begin
        # alike, so the prefix cache hits only where the workload means it to.
        count = len(words)
        self._stride = next(step for step in range(int(count * 0.618), count) if math.gcd(step, count) == 1)

    @classmethod
    def by_ratio(cls, text: str, chars_per_token: float) -> Self:
        """Passages of a text whose tokens nobody knows. A sentence full of names has twice as many as expected.

        Raises:
            ValueError: the ratio is not positive, or the text too short.
        """
        if chars_per_token <= 0:
            raise ValueError(f"chars_per_token must be positive, not {chars_per_token}")
        words = text.split()
        return cls(words, [(len(word) + 1) / chars_per_token for word in words], overshoot=2.5)

    @classmethod
    def by_tokens(cls, text: str, token_strs: Sequence[str]) -> Self:
        """Passages of a text whose tokens are known; a token counts for the word in which it ends.

        Raises:
            ValueError: the tokens are not the text's, or the text is too short.
        """
        ends = list(itertools.accumulate(map(len, token_strs)))
        if not ends or ends[-1] != len(text):
            raise ValueError(f"{len(text)} characters of text, {ends[-1] if ends else 0} of tokens")
        words, word_tokens, place = text.split(), [], 0
        for word in words:
            end = text.index(word, place) + len(word)
            word_tokens.append(bisect_right(ends, end) - bisect_right(ends, place))
            place = end
        return cls(words, word_tokens, overshoot=1.0)

    def cut(self, start: int, num_tokens: int) -> str:
        """The passage number `start` (any integer), of about `num_tokens` tokens and at least one word."""
        count = len(self._words)
        at = (start * self._stride) % count
        chosen, length = [self._words[at]], self._word_tokens[at]
        while len(chosen) < count:
            place = (at + len(chosen)) % count
            length += self._word_tokens[place]
            if length > num_tokens:
                break
            chosen.append(self._words[place])
        return " ".join(chosen)


def tales() -> str:
    """Grimm's tales, with single spaces between words: the text of every prompt."""
    return " ".join(TALES_PATH.read_text(encoding="utf-8").split())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lengths:
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None  # which shared prefix, None for none


def _fixed(spec: WorkloadSpec, draw: random.Random) -> _Lengths:
    return _Lengths(prompt_tokens=spec.prompt_tokens, output_tokens=spec.output_tokens)


def _lognormal(spec: WorkloadSpec, draw: random.Random) -> _Lengths:
    prompt, output = (
        max(1, round(draw.lognormvariate(math.log(median), spec.sigma)))
        for median in (spec.prompt_tokens, spec.output_tokens)
    )
    return _Lengths(prompt_tokens=prompt, output_tokens=output)


def _shared_prefix(spec: WorkloadSpec, draw: random.Random) -> _Lengths:
    prefix = draw.randrange(spec.num_prefixes)
    return _Lengths(prompt_tokens=spec.prompt_tokens, output_tokens=spec.output_tokens, prefix=prefix)


def _mixed(spec: WorkloadSpec, draw: random.Random) -> _Lengths:
    part = draw.random()
    if part < 0.4:
        return _lognormal(spec, draw)
    if part < 0.6:  # a long prompt, a short answer
        return _Lengths(prompt_tokens=4 * spec.prompt_tokens, output_tokens=max(1, spec.output_tokens // 4))
    if part < 0.8:  # a short prompt, a long answer
        return _Lengths(prompt_tokens=max(1, spec.prompt_tokens // 4), output_tokens=2 * spec.output_tokens)
    return _shared_prefix(spec, draw)


_LENGTHS: dict[WorkloadKind, Callable[[WorkloadSpec, random.Random], _Lengths]] = {
    WorkloadKind.FIXED: _fixed,
    WorkloadKind.LOGNORMAL: _lognormal,
    WorkloadKind.SHARED_PREFIX: _shared_prefix,
    WorkloadKind.MIXED: _mixed,
}


class Workload:
    """An endless sequence of requests."""

    def __init__(self, spec: WorkloadSpec, passages: Passages) -> None:
        self.spec = spec
        self._passages = passages
        # Where the seed puts the first passage: far apart for neighbouring seeds.
        self._origin = random.Random(spec.seed).randrange(1 << 30)

    def request(self, index: int) -> CompletionRequest:
        """Request number `index`, the same whenever it is asked for."""
        spec = self.spec
        draw = random.Random((spec.seed << 32) + index)
        lengths = _LENGTHS[spec.kind](spec, draw)
        output = min(lengths.output_tokens, spec.max_context_tokens // 2)
        room = int((spec.max_context_tokens - output - PROMPT_SLACK) / self._passages.overshoot)
        client, cancel_after = self._client(draw, output)
        return CompletionRequest(
            index=index,
            prompt=self._prompt(index, lengths.prefix, max(1, min(lengths.prompt_tokens, room))),
            max_tokens=output,
            client=client,
            cancel_after=cancel_after,
            temperature=spec.temperature,
            ignore_eos=spec.ignore_eos,
            seed=draw.randrange(1 << 31),
        )

    def _client(self, draw: random.Random, output_tokens: int) -> tuple[ClientKind, int | None]:
        share = draw.random()
        if share < self.spec.whole_share:
            return ClientKind.WHOLE, None
        if share < self.spec.whole_share + self.spec.cancelling_share:
            return ClientKind.CANCELLING, draw.randint(1, max(1, output_tokens // 2))
        return ClientKind.STREAMING, None

    def _prompt(self, index: int, prefix: int | None, num_tokens: int) -> str:
        own = self._origin + self.spec.num_prefixes + index
        if prefix is None:
            return self._passages.cut(own, num_tokens)
        shared = max(1, round(num_tokens * self.spec.prefix_share))
        parts = [self._passages.cut(self._origin + prefix, shared)]
        if num_tokens > shared:
            parts.append(self._passages.cut(own, num_tokens - shared))
        return "\n".join(parts)


def add_workload_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options that `spec_from_arguments` reads."""
    spec = WorkloadSpec()
    add = parser.add_argument
    kinds = [kind.value for kind in WorkloadKind]
    add(
        "--workload",
        choices=kinds,
        default=spec.kind.value,
        help="shape of the lengths (default: %(default)s)",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=spec.prompt_tokens,
        metavar="N",
        help="about (default: %(default)s)",
    )
    add("--output-tokens", type=int, default=spec.output_tokens, metavar="N", help="default: %(default)s")
    add("--sigma", type=float, default=spec.sigma, metavar="X", help="spread of lognormal lengths")
    add("--whole-share", type=float, default=spec.whole_share, metavar="X", help="clients that do not stream")
    add(
        "--cancelling-share",
        type=float,
        default=spec.cancelling_share,
        metavar="X",
        help="clients that leave",
    )
    add("--temperature", type=float, default=spec.temperature, metavar="X", help="default: %(default)s")
    add(
        "--stop-at-end",
        action="store_true",
        help="answers end where the model ends them, not at --output-tokens",
    )
    add(
        "--seed",
        type=int,
        default=spec.seed,
        metavar="N",
        help="of workload and arrivals (default: %(default)s)",
    )


def spec_from_arguments(arguments: argparse.Namespace, max_context_tokens: int | None) -> WorkloadSpec:
    """The workload that was asked for, within the model's context where that is known."""
    return WorkloadSpec(
        kind=WorkloadKind(arguments.workload),
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        sigma=arguments.sigma,
        whole_share=arguments.whole_share,
        cancelling_share=arguments.cancelling_share,
        max_context_tokens=max_context_tokens or WorkloadSpec().max_context_tokens,
        temperature=arguments.temperature,
        ignore_eos=not arguments.stop_at_end,
        seed=arguments.seed,
    )
