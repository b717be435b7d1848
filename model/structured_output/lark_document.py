"""Lark grammar for llguidance, built rule by rule, with JSON Schemas and other grammars as named sub-grammars."""

import json
import re
from collections.abc import Mapping
from typing import Any

from model.structured_output.grammar import json_grammar

# Free text: any valid UTF-8. Special tokens and marks have no bytes in the grammar's vocabulary, so they never match.
ANY_TEXT = r"/(.|\n)*/"
# Characters that str.strip() removes: Unicode's whitespace, and four separators.
_SPACES = r"[\s\x1c-\x1f]*"


class LarkDocument:
    """Grammar under construction. Methods return Lark expressions, which rules join.

    mark_ids: token id of each mark: a delimiter of tool calls or reasoning that is one token, such as `<tool_call>`.
    """

    def __init__(self, mark_ids: Mapping[str, int]) -> None:
        self._mark_ids = mark_ids
        self._split = (
            re.compile("|".join(map(re.escape, sorted(mark_ids, key=len, reverse=True)))) if mark_ids else None
        )
        self._rules: list[str] = []
        self._nested: list[dict[str, Any]] = []

    def literal(self, text: str) -> str:
        """Return a Lark expression for exactly this text, in which each tag of `mark_ids` is one token."""
        pieces, start = [], 0
        for found in self._split.finditer(text) if self._split else ():
            pieces += [_quote(text[start : found.start()]), f"<[{self._mark_ids[found[0]]}]>"]
            start = found.end()
        pieces.append(_quote(text[start:]))
        return " ".join(piece for piece in pieces if piece) or '""'

    def plain(self, text: str) -> str:
        """Return a Lark expression for exactly this text of a client, in which tags are plain text."""
        return _quote(text) or '""'

    def until(self, text: str, *, regex: str = "", min_length: int = 0, max_length: int | None = None) -> str:
        """Return a Lark expression for text up to and including the first occurrence of `text`.

        Args:
            regex: regular expressions of the text before, as for `terminal`; "": any text.
            min_length, max_length: characters of the text before.
        """
        before = rf"/(.|\n){{{min_length},{'' if max_length is None else max_length}}}/"
        if regex:
            before = f"({regex}) & {before}" if min_length or max_length is not None else f"({regex})"
        if self._begins_with_mark(text):
            return f"{self.text_without(text, before)} {self.literal(text)}"
        # The shortest match ends at the first occurrence, unless the text before must be longer or match a regex.
        # Excluding early occurrences by length is cheap; excluding them by regex exceeds limits for long bounded texts.
        end, later = escape(text), ""
        if regex:
            later = rf" & ~/(.|\n)*{end}(.|\n)+/"
        elif min_length:
            later = rf" & ~/(.|\n){{0,{min_length - 1}}}{end}(.|\n)*/"
        return self.terminal(f"(({before}) /{end}/){later}", lazy=True)

    def text_without(self, text: str, regex: str = ANY_TEXT) -> str:
        """Return a Lark expression for text that matches `regex`, as for `terminal`, and does not contain `text`."""
        return self.terminal(rf"({regex}) & ~/(.|\n)*{escape(text)}(.|\n)*/")

    def begun_by(self, text: str) -> str:
        """Return a Lark expression for `text` after any amount of whitespace, including none."""
        if self._begins_with_mark(text):
            return f"{self.terminal(f'/{_SPACES}/')} {self.literal(text)}"
        return self.terminal(f"/{_SPACES}{escape(text)}/")

    def text_not_begun_by(self, text: str) -> str:
        """Return a Lark expression for any text that does not begin with `text` after whitespace."""
        return self.terminal(rf"{ANY_TEXT} & ~/{_SPACES}{escape(text)}(.|\n)*/")

    def _begins_with_mark(self, text: str) -> bool:
        return self._split is not None and self._split.match(text) is not None

    def text(self) -> str:
        """Return a Lark expression for any text without special tokens and marks. May be empty."""
        return self.terminal(ANY_TEXT)

    def tokens(self, forbidden_ids: set[int], *, max_tokens: int) -> str:
        """Return a Lark expression for up to `max_tokens` tokens, none of which is in `forbidden_ids`."""
        if not max_tokens:  # llguidance rejects {0,0}
            return '""'
        return self.rule(f"<[^{','.join(map(str, sorted(forbidden_ids)))}]>{{0,{max_tokens}}}")

    def terminal(self, regex: str, *, lazy: bool = False) -> str:
        """Return a Lark expression for text that matches regular expressions `/…/`, joined by operators such as `&`.

        lazy: end at the shortest match.
        """
        name = f"t{len(self._rules)}" if lazy else f"T{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {regex}")
        return name

    def rule(self, body: str) -> str:
        """Add a grammar rule with this body, and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], *, lenient: bool) -> str:
        """Return a Lark expression for a schema from `prepare`. Raises GrammarError, as `json_grammar`."""
        return self.nested(json_grammar(schema, lenient=lenient))

    def nested(self, grammar: str) -> str:
        """Add a sub-grammar: llguidance's JSON text with one grammar in its list. Return a Lark expression for it."""
        (part,) = json.loads(grammar)["grammars"]
        name = f"g{len(self._nested)}"
        self._nested.append({**part, "name": name})
        return f"@{name}"

    def grammar(self, start: str) -> str:
        """Return the whole grammar in llguidance's form. `start`: expression of the whole completion."""
        main = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": main}, *self._nested]})


def _quote(text: str) -> str:
    return json.dumps(text) if text else ""


def escape(text: str) -> str:
    """Return a regular expression for exactly this text. In Lark it must be put between slashes."""
    return re.sub(r"[\\/.+*?()|\[\]{}^$&~#-]", r"\\\g<0>", text).replace("\n", r"\n")
