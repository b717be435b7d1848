"""Child process that compiles untrusted grammars under resource limits. Imports no torch.

llguidance limits most of the cost of a grammar, but not all of it. A `multipleOf` of a million compiles for over 10 s,
in one call that no thread can interrupt. A grammar that compiles in this child process also compiles in the worker.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from model.structured_output.grammar import LIMITS, GrammarError, Vocabulary, compile_grammar, json_grammar
from service.sandbox.child_process import run_command_loop
from service.structured_output.chat_grammar import chat_grammar
from service.structured_output.json_schema import prepare_schema

# Token masks computed as a trial. The first mask has most of the cost of a regular expression.
_NUM_TRIALS = 16
# Strings, regular expressions and comments of Lark are matched first and skipped, because they may contain any text.
# Outside strings, expressions and comments, the named groups match a schema and a temperature setting.
_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*'
    r"|(?P<schema>%json\s*)|(?P<setting>\btemperature\s*=)",
    re.DOTALL,
)
# llguidance's warning for a token reference, when it validates a grammar without a tokenizer.
_NO_VOCABULARY = "no tokenizer - can't validate "


def constraint_grammar(kind: str, content: Any, *, lenient: bool = False) -> str:
    """Return the grammar of an output constraint (see `OutputConstraint`). Raises GrammarError if it is invalid."""
    if kind == "json":
        return json_grammar(prepare_schema(content, lenient=lenient), lenient=lenient)
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(content))
    if kind == "choice":
        words = " | ".join(json.dumps(word) for word in content)
        return str(LLMatcher.grammar_from_lark(f"start: {words}"))
    return _lark_grammar(content)


def try_out(vocabulary: LLTokenizer, grammar: str) -> None:
    """Compile a grammar and sample a few tokens with it, so that a grammar over a limit is rejected before it is used.

    Raises:
        GrammarError: the grammar does not compile, exceeds a limit, or cannot be completed with this vocabulary.
    """
    rng, matcher = random.Random(0), compile_grammar(vocabulary, grammar)
    for _ in range(_NUM_TRIALS):
        if matcher.is_stopped():
            break
        allowed = [number for number, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if not allowed or not matcher.consume_token(rng.choice(allowed)):
            break
    if matcher.is_error():
        message = matcher.get_error()
        if message.startswith("NoExtension"):
            message = "no tokens of this model can complete the text; check for a rule or $ref that requires itself"
        raise GrammarError(message)


def _lark_grammar(content: str) -> str:
    """Convert a client's Lark or GBNF grammar to llguidance's form, with each schema (`%json {…}`) prepared.

    Raises:
        GrammarError: the grammar is invalid, sets a temperature, or refers to tokens.
    """
    try:
        text = llguidance.grammar_from("grammar", content)
    except ValueError as error:
        reason = str(error).removeprefix("Failed to convert the grammar from GBNF to Lark: ")
        raise GrammarError(reason) from None
    grammar = LLMatcher.grammar_from_lark(_prepare_schemas(text))
    is_error, warnings = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    if not is_error and any(line.startswith(_NO_VOCABULARY) for line in warnings):
        raise GrammarError("a grammar rule refers to a token, as in <|end|>; describe the token's text instead")
    return grammar


def _prepare_schemas(text: str) -> str:
    """Return a Lark grammar with its JSON Schemas prepared for llguidance. Raises GrammarError with the faulty line."""
    pieces, start = [], 0
    while found := _PARTS.search(text, start):
        pieces.append(text[start : found.end()])
        start = found.end()
        line = text.count("\n", 0, found.start()) + 1
        if found["setting"]:
            raise GrammarError(f"line {line} of the grammar: a rule cannot set temperature; set it in the request")
        if found["schema"]:
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
            except json.JSONDecodeError:
                continue  # llguidance reports the error
            if isinstance(schema, dict):
                try:
                    document = json.loads(json_grammar(prepare_schema(schema, lenient=False)))
                except GrammarError as error:
                    raise GrammarError(f"line {line} of the grammar: {error}") from None
                schema = document["grammars"][0]["json_schema"]
            pieces.append(json.dumps(schema))
    return "".join([*pieces, text[start:]])


def main() -> None:
    """Run the child process: compile one output constraint per command of the API process.

    The first command is `{"tokens", "special_token_ids", "eos_token_ids", "mark_ids"}` and the limits, with each
    token's bytes decoded as Latin-1, and in `mark_ids` the token ids of tags such as <think>. Each later command is
    `{"kind", "content", "lenient"}`. The reply to it has a `grammar` or an `error`.
    """
    run_command_loop(_prepare)


def _prepare(opening: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    tokens = [token.encode("latin-1") for token in opening["tokens"]]
    vocabulary = Vocabulary(tokens, opening["special_token_ids"], opening["eos_token_ids"]).for_masks()

    def grammar_of(command: Mapping[str, Any]) -> str:
        if command["kind"] == "chat":
            return chat_grammar(command["content"], opening["mark_ids"], opening["eos_token_ids"], grammar_of)
        return constraint_grammar(command["kind"], command["content"], lenient=command["lenient"])

    def compiled(command: Mapping[str, Any]) -> str:
        grammar = grammar_of(command)
        try_out(vocabulary, grammar)
        return grammar

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"grammar": compiled(command)}
        except ValueError as error:  # GrammarError, or text that is not valid Unicode
            tool = _faulty_tool(command, compiled)
            place = "" if tool is None else f"the parameters of the tool {tool!r}: "
            return {"error": f"{place}{GrammarError(str(error))}"}

    return handle


def _faulty_tool(command: Mapping[str, Any], compiled: Callable[[Mapping[str, Any]], str]) -> str | None:
    """Return the name of the first tool of a chat completion whose calls alone cannot be compiled; None without one."""
    content = command["content"]
    for tool in content["tools"] if command["kind"] == "chat" else ():
        try:
            compiled({**command, "content": {**content, "tools": [tool], "reasoning": None, "body": None}})
        except ValueError:
            return str(tool["name"])
    return None
