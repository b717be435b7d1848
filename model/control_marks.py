"""Control marks in a rendered conversation: those that the template wrote act, those that a client wrote are text.

A mark is a string, such as `<|im_end|>`, that the tokenizer turns into one control token. Template and messages become
one string, in which nothing tells whose a mark is: a message that holds marks would end itself and go on as the system.
So before rendering, the marks in what a client sent are broken by a character that the client did not send, and after
it, what is left whole is a mark and the rest, without that character, is text. transformers does likewise with
`sanitize_control_tokens=True`; there it has to be asked for.

A mark that begins with the template's own characters and ends with the client's is not seen: no template ends its text
with a part of a mark.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.tokenizer.interface import Tokenizer

# Noncharacters: Unicode keeps them free for a program's own use.
_BREAKERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ForbiddenText(ValueError):
    """A message whose text cannot be told from control marks. One line."""


class ControlMarks:
    """The marks of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.special_tokens
        marks = tuple(self._ids)
        self._single = tuple(mark for mark in marks if len(mark) == 1)
        self._whole = re.compile(f"({_one_of(marks)})")
        # Where one begins, even inside another: its first character.
        self._starts = re.compile(f"(?=(?:{_one_of(marks)}))(.)", re.DOTALL)
        # A mark may begin in one text and end in the next, and templates strip texts.
        beginnings = {mark[:end] for mark in marks for end in range(1, len(mark))}
        self._begun = re.compile(f"(?:{_one_of(beginnings)})(?=\\s*\\Z)")
        self._longest = max(map(len, marks), default=0)

    def shield(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        """The messages with every mark in their texts broken, and the character that breaks them; None if none had to.

        Raises:
            ForbiddenText: a mark is a single character and cannot be broken, or no character is free to do so.
        """
        texts = _texts(messages)
        if mark := next((mark for mark in self._single if any(mark in text for text in texts)), None):
            raise ForbiddenText(f"a message holds the control mark {mark!r}")
        free = next((char for char in _BREAKERS if not any(char in text for text in texts)), None)
        shielded = [self._broken(message, free if free is not None else _BREAKERS[0]) for message in messages]
        if shielded == list(messages):
            return shielded, None
        if free is None:
            raise ForbiddenText("the messages hold all the noncharacters from U+FDD0 to U+FDEF; leave one of them out")
        return shielded, free

    def encode(self, text: str, breaker: str | None) -> list[int]:
        """Token ids of a rendered conversation; `breaker` as `shield` gave it.

        Text around broken marks is encoded piece by piece between the whole ones, where it may be cut into other
        tokens than in one piece by a tokenizer that looks at what stands before a mark.

        Raises:
            TokenizerError: the text is beyond the tokenizer's means.
        """
        if breaker is None or breaker not in text:
            return self._tokenizer.encode(text, parse_special=True)
        ids: list[int] = []
        for number, piece in enumerate(self._whole.split(text)):
            if number % 2:
                ids.append(self._ids[piece])
            elif plain := piece.replace(breaker, ""):
                ids += self._tokenizer.encode(plain)
        return ids

    def _broken(self, value: Any, breaker: str) -> Any:
        if isinstance(value, str):
            value = self._starts.sub(f"\\1{breaker}", value)
            # Only its end can be the beginning of a mark.
            stripped = len(value.rstrip())
            tail = max(0, stripped - self._longest)
            if (found := self._begun.search(value, tail)) is not None:
                value = value[: found.end()] + breaker + value[found.end() :]
            return value
        if isinstance(value, Mapping):
            return {key: self._broken(item, breaker) for key, item in value.items()}
        if isinstance(value, list):
            return [self._broken(item, breaker) for item in value]
        return value


def _one_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of these texts that stands somewhere, as a tree: hundreds of marks are one look a place.

    Nothing else in the process runs while a pattern is searched for: in 2 MB, 700 marks as a plain alternation took 5
    to 9 s, as a tree they take under 0.1 s.
    """
    tails: dict[str, set[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], set()).add(text[1:])
    branches = [
        re.escape(first) + (f"(?:{_one_of(rest - {''})})" + ("?" if "" in rest else "") if rest != {""} else "")
        for first, rest in sorted(tails.items())
    ]
    return "|".join(branches) if branches else "(?!)"


def _texts(value: Any) -> list[str]:
    """Every string in it but the keys."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [text for item in items for text in _texts(item)]
