"""Escaping of special tokens in a client's messages, which are encoded as plain text.

Rendering joins template and messages into one string, in which a message with special tokens such as `<|im_end|>` could
end its own turn and continue as the system. So before rendering, a breaker character, which no text of the client
contains, is inserted into every special token in the client's texts. After rendering, unbroken special tokens become
ids, and the rest is encoded as text without the breaker. A special token that begins in the template and ends in a
message is not detected.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from model.tokenizer.interface import Tokenizer

# Unicode noncharacters, reserved for internal use by programs.
_BREAKERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ForbiddenText(ValueError):
    """Error of one line: a client's messages or tools contain a special token that cannot be escaped."""


class SpecialTokenEscaper:
    """Escaper of one tokenizer's special tokens in the messages of clients."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.special_tokens
        self._single = tuple(name for name in self._ids if len(name) == 1)
        self._whole = re.compile(f"({_one_of(self._ids)})")
        # Matches the first character of every special token, overlapping ones included.
        self._starts = re.compile(f"(?=(?:{_one_of(self._ids)}))(.)", re.DOTALL)
        # A special token may begin in one text and end in the next; templates may strip the whitespace between.
        beginnings = {name[:end] for name in self._ids for end in range(1, len(name))}
        self._begun = re.compile(f"(?:{_one_of(beginnings)})(?=\\s*\\Z)")
        self._longest = max(map(len, self._ids), default=0)

    def escape(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        """Return a client's messages with a breaker character in every special token, and the breaker (None if unused).

        A breaker also follows a text that ends with the beginning of a special token, which the next text may complete.

        Raises:
            ForbiddenText: a text contains a special token of one character, or special tokens and every breaker. Or
                a key of an object, such as a tool's parameter, contains a special token.
        """
        texts: list[str] = []
        _map_texts(messages, texts.append)
        if found := next((name for key in _keys(messages) for name in self._ids if name in key), None):
            raise ForbiddenText(f"a name in tools or messages contains the special token {found!r}; change the name")
        if found := next((name for name in self._single if any(name in text for text in texts)), None):
            raise ForbiddenText(f"a message contains the special token {found!r}; remove it")
        free = next((char for char in _BREAKERS if not any(char in text for text in texts)), None)
        breaker = _BREAKERS[0] if free is None else free
        escaped = _map_texts(messages, lambda text: self._with_breaker(text, breaker))
        if escaped == list(messages):
            return escaped, None
        if free is None:
            raise ForbiddenText(
                "the messages contain a special token and all noncharacters U+FDD0 to U+FDEF; remove the noncharacters"
            )
        return escaped, free

    def encode(self, text: str, breaker: str | None) -> list[int]:
        """Return a rendered conversation's token ids. `breaker`, from `escape`, is removed. Raises TokenizerError.

        With a breaker, each text between special tokens is encoded alone. A tokenizer whose result depends on text
        before a special token may then split the text differently.
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

    def _with_breaker(self, text: str, breaker: str) -> str:
        text = self._starts.sub(f"\\1{breaker}", text)
        # Only the end of the text can begin a special token that the next text completes.
        tail = max(0, len(text.rstrip()) - self._longest)
        if (found := self._begun.search(text, tail)) is not None:
            text = text[: found.end()] + breaker + text[found.end() :]
        return text


def _one_of(texts: Iterable[str]) -> str:
    """Return a regular expression, as a prefix tree, that matches the longest of the texts at a position.

    Python's `re` holds the GIL while it searches. In 2 MB of text, a search for 700 special tokens took 5 to 9 s as a
    plain alternation, and takes under 0.1 s as a tree.
    """
    tails: dict[str, set[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], set()).add(text[1:])
    branches = [
        re.escape(first) + (f"(?:{_one_of(rest - {''})})" + ("?" if "" in rest else "") if rest != {""} else "")
        for first, rest in sorted(tails.items())
    ]
    return "|".join(branches) if branches else "(?!)"


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return a JSON-like value with `change` applied to every string, the keys of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of all objects in a JSON-like value, nested objects included."""
    if isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _keys(item)
