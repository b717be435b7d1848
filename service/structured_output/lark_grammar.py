"""Preparation of a client's Lark or GBNF grammar for llguidance. Rules about tokens or sampling are rejected."""

import json
import re

import llguidance
from llguidance import LLMatcher

from model.structured_output.grammar import LIMITS, GrammarError, json_grammar
from service.structured_output.json_schema import prepared

# Strings, regular expressions and comments of Lark are matched first and skipped, because they may contain any text.
# Outside them, the named groups match a schema, a temperature setting and a token reference.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*'
    r"|(?P<schema>%json\s*)|(?P<setting>\btemperature\s*=)|(?P<token><[^<>\s]+>)",
    re.DOTALL,
)
# llguidance's warning for a token reference, when it validates a grammar without a tokenizer.
_NO_VOCABULARY = "no tokenizer - can't validate "


def lark_grammar(content: str) -> str:
    """Return llguidance's form of a grammar. Schemas in the grammar (`%json {…}`) are prepared as in `response_format`.

    Raises:
        GrammarError: the grammar is invalid or refers to tokens; the message says where.
    """
    try:
        text = llguidance.grammar_from("grammar", content)
    except ValueError as error:
        reason = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise GrammarError(_placed(reason, content)) from None
    ready, token = _ready(text)
    grammar = LLMatcher.grammar_from_lark(ready)
    is_error, warnings = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if not is_error and any(line.startswith(_NO_VOCABULARY) for line in warnings):
        place = f"line {_line(content, content.find(token))}: {token} " if token in content else ""
        raise GrammarError(f"{place}refers to a token; a grammar may only describe text")
    return grammar


def _ready(text: str) -> tuple[str, str]:
    """Return the Lark grammar with its schemas prepared, and its first token reference `<…>`, or an empty string."""
    pieces, start, token = [], 0, ""
    while found := _PARTS.search(text, start):
        pieces.append(text[start : found.end()])
        start = found.end()
        if found["setting"]:
            raise GrammarError(
                f"line {_line(text, found.start())}: a rule cannot set temperature; set it in the request"
            )
        if found["token"]:
            token = token or found["token"]
        if found["schema"]:
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
            except json.JSONDecodeError:
                continue  # llguidance reports the error
            pieces.append(_ready_schema(schema, f"line {_line(text, found.start())}"))
    return "".join([*pieces, text[start:]]), token


def _ready_schema(schema: object, line: str) -> str:
    if not isinstance(schema, dict):
        return json.dumps(schema)
    try:
        grammar = json_grammar(prepared(schema, lenient=False))
    except GrammarError as error:
        raise GrammarError(f"{line}: {error}") from None
    return json.dumps(json.loads(grammar)["grammars"][0]["json_schema"])


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _placed(reason: str, grammar: str) -> str:
    """Return an error about a GBNF grammar with the line number first, as in errors about Lark grammars."""
    if found := re.fullmatch(r"(.*) at line (\d+), '(.*)' \^ '(.*)'", reason, re.DOTALL):
        what, number, before, after = found.groups()  # `before` and `after` are escaped as in Rust: \\n is a line end
        beside = f"before {after}" if after else f"after {before}"
        return f"line {number}: {what} {beside.replace(chr(92) + 'n', ' ').strip()}"
    if found := re.fullmatch(r"Rule '(?P<rule>[\w-]+)' not found", reason):
        for number, line in enumerate(grammar.splitlines(), 1):
            if re.search(rf"(?<![\w\"-]){found['rule']}(?![\w\"-])", line):
                return f"line {number}: {reason}"
    return reason
