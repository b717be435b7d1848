"""Child process that compiles untrusted grammars under resource limits. Imports no torch.

llguidance limits most of the cost of a grammar, but not all of it. A `multipleOf` of a million compiles for over 10 s,
in one call that no thread can interrupt. The API process therefore sends each grammar to this child process, which has
limits of memory and CPU time. A grammar that compiles here also compiles in the worker.

If a schema is rejected, the error names the innermost part of the schema that alone causes the same error.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.structured_output.grammar import GrammarError, Vocabulary, compile_grammar, json_grammar
from service.sandbox.child_process import run_command_loop
from service.structured_output.json_schema import NAMED, at, prepared
from service.structured_output.lark_grammar import lark_grammar

# Token masks computed as a trial. The first mask has most of the cost of a regular expression.
_NUM_TRIALS = 16
# Limit of the schema parts compiled one by one to find the invalid part.
_MAX_PARTS = 1000
# Keywords with one schema as their value, and keywords with a list of schemas.
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def check(vocabulary: LLTokenizer, kind: str, content: Any, *, lenient: bool = False) -> str:
    """Compile the requested format as a trial, and return the grammar for the worker.

    Args:
        kind: a value of `response_format.ConstraintKind`.
        lenient: ignore schema keywords that cannot be enforced.

    Raises:
        GrammarError: the format cannot be enforced; the message says where.
    """
    if kind == "json":
        schema = prepared(content, lenient=lenient)
        try:
            return _try_out(vocabulary, json_grammar(schema, lenient=lenient))
        except GrammarError as error:
            raise at(_find_fault(vocabulary, schema, str(error), lenient=lenient), str(error)) from None
    if kind == "regex":
        return _try_out(vocabulary, LLMatcher.grammar_from_regex(content))
    if kind == "choice":
        words = " | ".join(json.dumps(word) for word in content)
        return _try_out(vocabulary, LLMatcher.grammar_from_lark(f"start: {words}"))
    return _try_out(vocabulary, lark_grammar(content))


def _try_out(vocabulary: LLTokenizer, grammar: str) -> str:
    """Sample a few tokens, so that a grammar with masks over a limit is rejected before a completion starts.

    Returns the grammar.

    Raises:
        GrammarError: the grammar does not compile, or a token mask exceeds a limit.
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
        return grammar
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


def _find_fault(vocabulary: LLTokenizer, schema: Mapping[str, Any], message: str, *, lenient: bool) -> str:
    """Return the path of the innermost part of a schema that alone causes the same error, as in "properties.age".

    The path is empty if only the whole schema causes the error.
    """
    shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}

    def has_fault(part: Mapping[str, Any]) -> bool:
        try:
            compile_grammar(vocabulary, json_grammar({**shared, **part}, lenient=lenient))
        except GrammarError as error:
            return str(error) == message
        return False

    path, trials = list[str](), iter(range(_MAX_PARTS))
    while found := next((pair for pair, _ in zip(_parts(schema), trials, strict=False) if has_fault(pair[1])), None):
        path.append(found[0])
        schema = found[1]
    return ".".join(path)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the paths and direct subschemas of a schema."""
    for key, value in schema.items():
        if key in _ONE and isinstance(value, dict):
            yield key, value
        elif key in (*_LISTS, "items") and isinstance(value, list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(value) if isinstance(part, dict))
        elif key in NAMED and isinstance(value, dict):
            yield from ((f"{key}.{name}", part) for name, part in value.items() if isinstance(part, dict))


def main() -> None:
    """Check grammars for the parent process.

    The first command is `{"tokens", "special_token_ids", "eos_token_ids"}` and the limits, with each token's bytes
    decoded as Latin-1. Each further command is `{"kind", "content", "lenient"}`. A reply is `{"grammar"}` or
    `{"error"}`.
    """
    run_command_loop(_prepare)


def _prepare(opening: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    tokens = [token.encode("latin-1") for token in opening["tokens"]]
    vocabulary = Vocabulary(tokens, opening["special_token_ids"], opening["eos_token_ids"]).for_masks()

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"grammar": check(vocabulary, command["kind"], command["content"], lenient=command["lenient"])}
        except ValueError as error:  # GrammarError, or text that is not valid Unicode
            return {"error": str(GrammarError(str(error)))}

    return handle
