"""The child process that compiles a stranger's grammar: `main`. Imports no torch.

The library bounds most of what a grammar can cost, not all: a `multipleOf` of a million compiles for over 10 s, in one
call that no thread can stop. So the API process hands each grammar to a child that the operating system bounds: memory
by RLIMIT_AS, processor time by a timer whose signal ends the process. What passes here compiles in the worker too.

A schema that cannot be used is searched for the innermost part that cannot be used alone.
"""

import json
import random
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.grammar import GrammarError, Vocabulary, compile_grammar, json_grammar
from model.parent_death import end_with_parent
from service.structured.lark import lark_grammar
from service.structured.schemas import NAMED, at, prepared

# Masks that are computed on trial. Most of what a regular expression costs is paid at its first.
_NUM_TRIALS = 16
# Parts of a schema that are compiled one by one to find the one that is wrong.
_MAX_PARTS = 1000
# Where schemas stand in a schema that can be wrong alone: by a key, in a list.
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def grammar_of(kind: str, content: Any, *, lenient: bool) -> str:
    """The library's form of what was asked for. `kind` is one of `formats.Kind`.

    Raises:
        GrammarError: it is no grammar.
    """
    if kind == "json":
        return json_grammar(content, lenient=lenient)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(word) for word in content))
    return lark_grammar(content)


def check(vocabulary: LLTokenizer, kind: str, content: Any, *, lenient: bool = False) -> str:
    """The grammar, as the worker is given it.

    Raises:
        GrammarError: it cannot be used; says where.
    """
    if kind == "json":
        content = prepared(content, lenient=lenient)
    try:
        grammar = grammar_of(kind, content, lenient=lenient)
        _try_out(vocabulary, grammar)
        return grammar
    except GrammarError as error:
        if kind != "json":
            raise
        raise at(_place_of(vocabulary, content, str(error), lenient=lenient), str(error)) from None


def _try_out(vocabulary: LLTokenizer, grammar: str) -> None:
    """Compute some masks: a grammar whose masks are over a limit is refused here and not in the middle of a text."""
    rng, matcher, token_ids = random.Random(0), compile_grammar(vocabulary, grammar), list[int]()
    for _ in range(_NUM_TRIALS):
        if matcher.is_stopped():
            break
        allowed = [number for number, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if not allowed:
            break
        token_ids.append(rng.choice(allowed))
        if not matcher.consume_token(token_ids[-1]):
            break
    if not matcher.is_error():
        return
    message = matcher.get_error()
    if message.startswith("NoExtension") and not _can_go_on(grammar, vocabulary.decode_bytes(token_ids)):
        message = "no text can ever be complete: a rule or a $ref leads only back to itself, most likely"
    raise GrammarError(message)


def _can_go_on(grammar: str, text: bytes) -> bool:
    """Whether a grammar lets anything follow a text, were there a token for every byte."""
    matcher = compile_grammar(Vocabulary([bytes([byte]) for byte in range(256)], [], []).for_masks(), grammar)
    matcher.consume_tokens(list(text))
    matcher.compute_bitmask()
    return not matcher.is_error()


def _place_of(vocabulary: LLTokenizer, schema: Mapping[str, Any], complaint: str, *, lenient: bool) -> str:
    """The innermost part of a schema that alone gives the same complaint: "properties.age". Empty for all of it."""
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    place, num_tried = "", 0

    def is_wrong(part: Mapping[str, Any]) -> bool:
        try:
            compile_grammar(vocabulary, json_grammar({**shared, **part}, lenient=lenient))
        except GrammarError as error:
            return str(error) == complaint
        return False

    while True:
        for step, part in _parts(schema):
            num_tried += 1
            if num_tried > _MAX_PARTS:
                return place
            if is_wrong(part):
                place, schema = f"{place}.{step}" if place else step, part
                break
        else:
            return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas right within a schema, and how one gets there."""
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield key, value
        elif key in (*_LISTS, "items") and isinstance(value, list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(value) if isinstance(part, dict))
        elif key in NAMED and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items() if isinstance(part, dict))


def main() -> None:
    """Check for the parent: JSON lines in, JSON lines out, until the parent closes the pipe or a limit ends it.

    The first line is `{"tokens", "mark_ids", "eos_token_ids", "memory_bytes", "cpu_seconds"}` (a token's bytes as
    Latin-1) and is answered when the vocabulary is made; each further line is `{"kind", "content", "lenient"}`. An
    answer is `{"grammar"}` or `{"error"}`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which then closes the pipe
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    order = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = [token.encode("latin-1") for token in order["tokens"]]
    vocabulary = Vocabulary(tokens, order["mark_ids"], order["eos_token_ids"]).for_masks()
    resource.setrlimit(resource.RLIMIT_AS, (order["memory_bytes"],) * 2)
    answer, cpu_seconds = {"grammar": ""}, order["cpu_seconds"]
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        order = json.loads(line)
        try:
            answer = {"grammar": check(vocabulary, order["kind"], order["content"], lenient=order["lenient"])}
        except ValueError as error:  # GrammarError, and text that is no Unicode
            answer = {"error": str(GrammarError(str(error)))}
