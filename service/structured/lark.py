"""A client's grammar, in Lark's notation or GBNF, made ready for the library; what is not about text is refused."""

import json
import re

import llguidance
from llguidance import LLMatcher

from model.grammar import LIMITS, GrammarError, json_grammar
from service.structured.schemas import prepared

# What of Lark's notation may hold anything (texts, regular expressions, comments), and what is looked for outside them.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*'
    r"|(?P<schema>%json\s*)|(?P<setting>\btemperature\s*=)|(?P<token><[^<>\s]+>)",
    re.DOTALL,
)
_NO_VOCABULARY = (
    "no tokenizer - can't validate "  # the library's words of tokens by name or number, where it knows none
)


def lark_grammar(content: str) -> str:
    """The library's form of a grammar. The schemas in it (`%json {…}`) mean what they mean elsewhere.

    Raises:
        GrammarError: it is no grammar, or speaks of tokens; says where.
    """
    try:
        text = llguidance.grammar_from("grammar", content)
    except ValueError as error:
        reason = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise GrammarError(_placed(reason, content)) from None
    ready, token = _ready(text)
    grammar = LLMatcher.grammar_from_lark(ready)
    is_error, told = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if not is_error and any(line.startswith(_NO_VOCABULARY) for line in told):
        place = f"line {_line(content, content.find(token))}: {token} " if token in content else ""
        raise GrammarError(f"{place}stands for tokens and control marks; a grammar speaks of text")
    return grammar


def _ready(text: str) -> tuple[str, str]:
    """Lark's notation with its schemas made ready, and the first `<…>` that stands for tokens, if there is one."""
    pieces, start, token = [], 0, ""
    while found := _PARTS.search(text, start):
        pieces.append(text[start : found.end()])
        start = found.end()
        if found["setting"]:
            raise GrammarError(
                f"line {_line(text, found.start())}: temperature is the request's, a rule cannot have one"
            )
        if found["token"]:
            token = token or found["token"]
        if found["schema"]:
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
            except json.JSONDecodeError:
                continue  # the library says what is wrong with it
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
    """A complaint of GBNF with its line first, as those of Lark have it."""
    if found := re.fullmatch(r"(.*) at line (\d+), '(.*)' \^ '(.*)'", reason, re.DOTALL):
        what, number, before, after = found.groups()  # the last two in Rust's notation, where \\n is a line end
        beside = f"before {after}" if after else f"after {before}"
        return f"line {number}: {what} {beside.replace(chr(92) + 'n', ' ').strip()}"
    if found := re.fullmatch(r"Rule '(?P<rule>[\w-]+)' not found", reason):
        for number, line in enumerate(grammar.splitlines(), 1):
            if re.search(rf"(?<![\w\"-]){found['rule']}(?![\w\"-])", line):
                return f"line {number}: {reason}"
    return reason
