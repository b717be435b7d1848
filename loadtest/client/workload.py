"""Workloads of a load test: seeded sequences of completion requests, with prompts cut from Grimm's tales.

Request number i depends only on the workload's spec and i. Prompt lengths are approximate, since words are not cut.
"""

import argparse
import heapq
import itertools
import math
import random
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from loadtest.client.outcome import ClientKind, Ending, Outcome
from loadtest.client.requests import (
    ConversationRequest,
    EmbeddingLoadRequest,
    LaterTurn,
    LoadRequest,
    StructuredRequest,
    ToolRequest,
)
from loadtest.measurement.benchmark_program import add_options, described, options_of

TALES_PATH = Path(__file__).with_name("tales.txt")
# Tokens of a prompt beyond its wanted length: its first word lacks a space, and a special token may come first.
_PROMPT_SLACK = 4
NUM_PREFIXES, PREFIX_SHARE = 4, 0.75
# In the order of their shares in a workload.
_CLIENTS = (ClientKind.WHOLE, ClientKind.CANCELLING, ClientKind.SLOW, ClientKind.STREAMING)
_JSON_TOKENS = 96  # of a tool call, or of an answer in JSON, whose schemas bound their lengths
_TURN_STRIDE = 7_919  # between the passages of a conversation


class WorkloadKind(StrEnum):
    """Kind of the requests in a workload. Lengths are lognormal, except for fixed, shared-prefix and mixed."""

    FIXED = "fixed"  # all prompts and all completions have one length
    LOGNORMAL = "lognormal"  # lognormal around the given medians, like production traces
    SHARED_PREFIX = "shared-prefix"  # three quarters of a prompt are one of four prefixes
    MIXED = "mixed"  # lognormal lengths, long prompts, long completions and shared prefixes together
    CHAT = "chat"  # one question and answer
    MULTI_TURN = "multi-turn"  # conversations whose context grows, with time to think between the turns
    STRUCTURED = "structured"  # JSON that follows a schema
    TOOLS = "tools"  # a tool call, its result, an answer
    EMBEDDINGS = "embeddings"


# Characters of a prompt besides its text: chat template, definition of the tool, its call and result.
_OVERHEAD = {
    WorkloadKind.CHAT: 120,
    WorkloadKind.MULTI_TURN: 120,
    WorkloadKind.STRUCTURED: 480,
    WorkloadKind.TOOLS: 1500,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSpec:
    """Settings of a workload: kinds, lengths, behaviour of clients, sampling and seed.

    kind: a `WorkloadKind`, or several with their shares, as `shares_of` parses them.
    prompt_tokens, output_tokens: length of each prompt and completion; lognormal: the median; mixed: the base length.
    sigma: standard deviation of the logarithm of lengths; with 0.6, p95 is 2.7 times the median.
    ..._share: shares of requests with a client of that kind; all other clients stream to the end, and read at once.
    """

    kind: str = WorkloadKind.FIXED
    prompt_tokens: int = described(64, "approximate number of tokens in a prompt")
    output_tokens: int = described(64, "number of tokens in a completion")
    sigma: float = described(0.6, "standard deviation of the logarithm of lengths, if lognormal")
    whole_share: float = described(0.0, "share of requests without streaming, from 0 to 1")
    cancelling_share: float = described(0.0, "share of requests whose client disconnects early, from 0 to 1")
    slow_share: float = described(0.0, "share of requests whose client reads slowly, from 0 to 1")
    slow_bytes_per_second: float = described(2000.0, "rate at which a slow client reads, in bytes per second")
    turns: int = described(5, "most turns of a conversation, in multi-turn")
    think_seconds: float = described(1.0, "mean of the shortest pause before a later turn, in seconds")
    tool_seconds: float = described(0.1, "shortest pause between a tool call and its result, in seconds")
    max_context_tokens: int = 512
    temperature: float = described(1.0, "sampling temperature")
    ignore_eos: bool = True
    seed: int = described(0, "seed of the requests and of their arrival times")


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
        self.chars_per_token = len(text) / len(token_strs)
        # Coprime to the number of words, so that no two passages begin alike, as the prefix cache would notice.
        self._stride = next(step for step in range(int(count * 0.618), count) if math.gcd(step, count) == 1)

    def cut(self, start: int, num_tokens: int) -> str:
        """Return passage number `start` (any integer): whole words, at least one, of at most `num_tokens` tokens."""
        return self.cut_counted(start, num_tokens)[0]

    def cut_counted(self, start: int, num_tokens: int) -> tuple[str, int]:
        """Return a passage as `cut`, and its number of tokens."""
        count = len(self._words)
        at = (start * self._stride) % count
        chosen, length = [self._words[at]], self._word_tokens[at] + 1  # a cut may split one more token
        while len(chosen) < count:
            place = (at + len(chosen)) % count
            if length + self._word_tokens[place] > num_tokens:
                break
            length += self._word_tokens[place]
            chosen.append(self._words[place])
        return " ".join(chosen), length


def tales() -> str:
    """Return Grimm's tales with single spaces between words: the text from which all prompts are cut.

    Dashes become hyphens, so that every token is text: a server shows a token within a character in its own way.
    """
    return " ".join(TALES_PATH.read_text(encoding="utf-8").replace("\N{EM DASH}", "-").split())


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Return random token ids, which no prefix cache holds. The vocabulary's last id, possibly EOS, is excluded."""
    return [rng.randrange(vocab_size - 1) for _ in range(num_tokens)]


class Workload:
    """Endless sequence of load-test requests.

    Raises `ValueError` if the spec's kind is not valid.
    """

    def __init__(self, spec: WorkloadSpec, passages: Passages) -> None:
        self.spec = spec
        self.passages = passages
        self._shares = shares_of(spec.kind)
        # Number of the first passage. Neighbouring seeds get distant numbers.
        self._origin = random.Random(spec.seed).randrange(1 << 30)

    def __iter__(self) -> Iterator[LoadRequest]:
        """Return the requests without end, in order of sending: a later turn once it is due, or a new request."""
        return Turns(map(self.request, itertools.count()))

    def request(self, index: int, kind: WorkloadKind | None = None) -> LoadRequest:
        """Return request number `index` of the workload, or of this kind: always the same for the same number."""
        spec = self.spec
        rng = random.Random((spec.seed << 32) + index)
        if kind is None:
            kind = self._kind(rng)
        prompt, output, prefix = self._lengths(rng, kind)
        output = min(output, spec.max_context_tokens // 2)
        share, shares = rng.random(), (spec.whole_share, spec.cancelling_share, spec.slow_share)
        client = _CLIENTS[bisect_right(list(itertools.accumulate(shares)), share)]
        cancel_after = rng.randint(1, max(1, output // 2)) if client is ClientKind.CANCELLING else None
        common: dict[str, Any] = {
            "index": index,
            "max_tokens": output,
            "client": client,
            "cancel_after": cancel_after,
            "bytes_per_second": spec.slow_bytes_per_second if client is ClientKind.SLOW else None,
            "temperature": spec.temperature,
            "seed": rng.randrange(1 << 31),
        }
        overhead = int(_OVERHEAD.get(kind, 0) / self.passages.chars_per_token)
        room = self.room(output) - overhead
        prompt = max(1, min(prompt, room))
        text = self._prompt(index, prefix, prompt)
        if kind in (WorkloadKind.CHAT, WorkloadKind.MULTI_TURN):
            later = self._later(rng, index, room - prompt, overhead) if kind is WorkloadKind.MULTI_TURN else []
            return ConversationRequest(prompt=[text], later=later, ignore_eos=spec.ignore_eos, **common)
        if kind is WorkloadKind.STRUCTURED:
            common |= {"prompt": [f"{text}\nPlan a visit. Answer in JSON."], "max_tokens": _JSON_TOKENS}
            return StructuredRequest(ignore_eos=False, **common)
        if kind is WorkloadKind.TOOLS:
            common |= {"prompt": [f"{text}\nHow will the weather be?"], "max_tokens": _JSON_TOKENS}
            return ToolRequest(ignore_eos=False, answer_tokens=output, tool_seconds=spec.tool_seconds, **common)
        if kind is WorkloadKind.EMBEDDINGS:
            common |= {"client": ClientKind.WHOLE, "cancel_after": None, "bytes_per_second": None, "max_tokens": 0}
            return EmbeddingLoadRequest(prompt=text, **common)
        return LoadRequest(prompt=text, ignore_eos=spec.ignore_eos, **common)

    def _kind(self, rng: random.Random) -> WorkloadKind:
        kinds = list(self._shares)
        return rng.choices(kinds, list(self._shares.values()))[0] if len(kinds) > 1 else kinds[0]

    def room(self, output_tokens: int) -> int:
        """Return the number of tokens of the longest prompt that leaves room for a completion, at least 1."""
        room = self.spec.max_context_tokens - output_tokens - _PROMPT_SLACK
        return max(1, int(room / self.passages.overshoot))

    def _lengths(self, rng: random.Random, kind: WorkloadKind) -> tuple[int, int, int | None]:
        """Return the number of prompt tokens, of completion tokens, and the index of the shared prefix (None: none)."""
        prompt, output = self.spec.prompt_tokens, self.spec.output_tokens
        if kind is WorkloadKind.MIXED:
            part = rng.random()
            if 0.4 <= part < 0.6:  # a long prompt, a short completion
                return 4 * prompt, max(1, output // 4), None
            if 0.6 <= part < 0.8:  # a short prompt, a long completion
                return max(1, prompt // 4), 2 * output, None
            kind = WorkloadKind.LOGNORMAL if part < 0.4 else WorkloadKind.SHARED_PREFIX
        if kind not in (WorkloadKind.FIXED, WorkloadKind.SHARED_PREFIX):
            sigma = self.spec.sigma
            prompt, output = (max(1, round(rng.lognormvariate(math.log(m), sigma))) for m in (prompt, output))
        return prompt, output, rng.randrange(NUM_PREFIXES) if kind is WorkloadKind.SHARED_PREFIX else None

    def _later(self, rng: random.Random, index: int, room: int, overhead: int) -> list[LaterTurn]:
        """Return the turns of a conversation after the first, as many as `turns`, or as fit into the context."""
        spec, turns = self.spec, list[LaterTurn]()
        while len(turns) < spec.turns - 1:
            prompt, output, _ = self._lengths(rng, WorkloadKind.MULTI_TURN)
            room -= prompt + output + overhead
            if room < 0:
                break
            text = self.passage(index + _TURN_STRIDE * (len(turns) + 1), prompt)
            think = rng.expovariate(1 / spec.think_seconds) if spec.think_seconds > 0.0 else 0.0
            turns.append(LaterTurn(text, output, think))
        return turns

    def passage(self, index: int, num_tokens: int) -> str:
        """Return the text of request number `index`, of this length."""
        return self.passages.cut(self._origin + NUM_PREFIXES + index, num_tokens)

    def _prompt(self, index: int, prefix: int | None, num_tokens: int) -> str:
        if prefix is None:
            return self.passage(index, num_tokens)
        shared = max(1, round(num_tokens * PREFIX_SHARE))
        parts = [self.passages.cut(self._origin + prefix, shared)]
        if num_tokens > shared:
            parts.append(self.passage(index, num_tokens - shared))
        return "\n".join(parts)


class Turns(Iterator[LoadRequest]):
    """New requests and their follow-ups, in the order of sending: the follow-up that is due longest goes first.

    So a load at a given rate stays at that rate: a follow-up takes the place of a new request, and its pause is the
    shortest. A follow-up keeps the index of its new request. Follow-ups that are not due when the new requests have
    ended are sent without their pause.
    """

    def __init__(self, new: Iterator[LoadRequest]) -> None:
        self._new = new
        self._waiting: list[tuple[float, int, LoadRequest]] = []  # heap: time when due, index, request

    def __next__(self) -> LoadRequest:
        """Return the next request to send."""
        is_due = bool(self._waiting) and self._waiting[0][0] <= time.perf_counter()
        request = None if is_due else next(self._new, None)
        if request is None:
            if not self._waiting:
                raise StopIteration
            request = heapq.heappop(self._waiting)[-1]
        return replace(request, on_end=self._add_follow_up)

    def _add_follow_up(self, request: LoadRequest, outcome: Outcome) -> None:
        if outcome.ending is Ending.OK and (follow_up := request.follow_up(outcome)) is not None:
            due = outcome.end_seconds + follow_up.pause_seconds
            heapq.heappush(self._waiting, (due, request.index, follow_up.request))


def shares_of(kind: str) -> dict[WorkloadKind, float]:
    """Parse `KIND` or `KIND=SHARE,KIND=SHARE,...`. Raises `ValueError` for unknown kinds and shares of 0 or less."""
    shares: dict[WorkloadKind, float] = {}
    for part in kind.split(","):
        name, _, share = part.partition("=")
        try:
            shares[WorkloadKind(name.strip())] = float(share or 1)
        except ValueError:
            names = ", ".join(WorkloadKind)
            raise ValueError(f"--workload: {part!r} is not KIND or KIND=SHARE with KIND of {names}") from None
    if min(shares.values()) <= 0:
        raise ValueError(f"--workload: shares must be above 0, not {kind!r}")
    return shares


def add_workload_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add command-line options for the fields of `WorkloadSpec` to a parser."""
    text = f"kind of the requests, or several with their shares, such as chat=3,tools=1: {', '.join(WorkloadKind)}"
    add_options(parser, {"workload": (str(WorkloadKind.FIXED), text)})
    add_options(parser, options_of(WorkloadSpec))
    text = "let an end-of-text token end a completion before --output-tokens"
    add_options(parser, {"stop-at-end": (False, text)})
    text = "share of requests that repeat known questions; another answer is a failure, changed-answer"
    add_options(parser, {"canary-share": (0.02, text)})


def spec_from_arguments(arguments: argparse.Namespace) -> WorkloadSpec:
    """Return the workload settings in the parsed options of `add_workload_arguments`. Raises `ValueError`."""
    values = {name: getattr(arguments, name) for name in options_of(WorkloadSpec)}
    shares_of(arguments.workload)
    for name in ("whole_share", "cancelling_share", "slow_share", "canary_share"):
        if not 0.0 <= getattr(arguments, name) <= 1.0:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 1")
    if not arguments.slow_bytes_per_second > 0.0:
        raise ValueError("--slow-bytes-per-second must be above 0")
    return WorkloadSpec(kind=arguments.workload, ignore_eos=not arguments.stop_at_end, **values)
