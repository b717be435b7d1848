"""Child process that compiles untrusted grammars under resource limits. Imports no torch.

llguidance limits most of the cost of a grammar, but not all of it. A `multipleOf` of a million compiles for over 10 s,
in one call that no thread can interrupt. The API process therefore sends each grammar to this child process. The
operating system limits the child: RLIMIT_AS limits its memory, and a timer's signal ends it when its CPU time is spent.
A grammar that compiles here also compiles in the worker.

If a schema is rejected, the error names the innermost part of the schema that alone causes the same error.
"""

import json
import random
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.structured_output.grammar import GrammarError, Vocabulary, compile_grammar, json_grammar
from model.system.parent_death import end_with_parent
from service.structured_output.json_schema import NAMED, at, prepared
from service.structured_output.lark_grammar import lark_grammar

# Token masks computed as a trial. The first mask has most of the cost of a regular expression.
_NUM_TRIALS = 16
# Limit of the schema parts compiled one by one to find the invalid part.
_MAX_PARTS = 1000
# Keywords with one schema as their value, and keywords with a list of schemas.
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def grammar_of(kind: str, content: Any, *, lenient: bool) -> str:
    """Return llguidance's form of the requested format. `kind` is a value of `formats.Kind`.

    Raises:
        GrammarError: `content` is not a valid grammar.
    """
    if kind == "json":
        return json_grammar(content, lenient=lenient)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(content)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(word) for word in content))
    return lark_grammar(content)


def check(vocabulary: LLTokenizer, kind: str, content: Any, *, lenient: bool = False) -> str:
    """Compile the requested format as a trial, and return the grammar for the worker.

    Raises:
        GrammarError: the format cannot be enforced; the message says where.
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
    """Sample a few tokens, so that a grammar with masks over a limit is rejected before a completion starts.

    Raises:
        GrammarError: the grammar does not compile, or one of its masks exceeds a limit.
    """
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
        message = "no text can ever be complete; check for a rule or a $ref that refers only to itself"
    raise GrammarError(message)


def _can_go_on(grammar: str, text: bytes) -> bool:
    """Return True if some byte may follow `text` in the grammar, whether or not the vocabulary has a token for it."""
    matcher = compile_grammar(Vocabulary([bytes([byte]) for byte in range(256)], [], []).for_masks(), grammar)
    matcher.consume_tokens(list(text))
    matcher.compute_bitmask()
    return not matcher.is_error()


def _place_of(vocabulary: LLTokenizer, schema: Mapping[str, Any], complaint: str, *, lenient: bool) -> str:
    """Return the path of the innermost part of a schema that alone causes the same error, as in "properties.age".

    The path is empty if only the whole schema causes the error.
    """
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
    """Yield the direct subschemas of a schema, each with its path."""
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield key, value
        elif key in (*_LISTS, "items") and isinstance(value, list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(value) if isinstance(part, dict))
        elif key in NAMED and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items() if isinstance(part, dict))


def main() -> None:
    """Check grammars for the parent process: read requests as JSON lines, and write responses as JSON lines.

    The process ends when the parent closes the pipe, or when a limit ends it. The first line is `{"tokens",
    "special_token_ids", "eos_token_ids", "memory_bytes", "cpu_seconds"}`, with each token's bytes decoded as Latin-1.
    Its response is sent once the vocabulary is built. Each further line is `{"kind", "content", "lenient"}`. A response
    is `{"grammar"}` or `{"error"}`.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles these signals and then closes the pipe
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    order = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = [token.encode("latin-1") for token in order["tokens"]]
    vocabulary = Vocabulary(tokens, order["special_token_ids"], order["eos_token_ids"]).for_masks()
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
        except ValueError as error:  # GrammarError, or text that is not valid Unicode
            answer = {"error": str(GrammarError(str(error)))}
