"""Tokens that were added to a vocabulary by name, and how they are found in a text before it is split.

The order is that of `tokenizers`: first the tokens that are looked for in the text as it is, then the text between
them is normalized and searched for the others. The leftmost is taken, and of those the longest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from model.tokenizer.interface import TokenizerError

Normalize = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedToken:
    """An entry of `added_tokens` in tokenizer.json.

    special: a control mark, which has no text of its own.
    normalized: it is looked for after the text has been normalized.
    trimmed: it swallows spaces beside it or must stand alone (lstrip, rstrip, single_word).
    """

    id: int
    content: str
    special: bool
    normalized: bool
    trimmed: bool

    @classmethod
    def mark(cls, content: str, token_id: int) -> "AddedToken":
        """A control mark, found in the text as it is."""
        return cls(id=token_id, content=content, special=True, normalized=False, trimmed=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, token_id: int | None = None) -> "AddedToken":
        """Read an entry of tokenizer.json, or with its id one of tokenizer_config.json's `added_tokens_decoder`.

        Raises:
            TokenizerError: it has no content or no id.
        """
        number, content = values.get("id", token_id), values.get("content")
        if not isinstance(number, int) or number < 0 or not isinstance(content, str) or not content:
            raise TokenizerError(f"an added token wants an id and a content, not {values!r}")
        special = values.get("special", False) is True
        return cls(
            id=number,
            content=content,
            special=special,
            normalized=values.get("normalized", not special) is True,
            trimmed=any(values.get(key) is True for key in ("lstrip", "rstrip", "single_word")),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """What is done to a text before it is split into pieces.

    added_tokens: ordinary tokens that are looked for before everything else, none of them trimmed.
    normalize: changes the text; None leaves it.
    add_prefix_space: put a space before every stretch that does not begin with one.
    """

    added_tokens: tuple[AddedToken, ...] = ()
    normalize: Normalize | None = None
    add_prefix_space: bool = False


class TextSplitter:
    """Finds `tokens` in a text, and prepares what is between them."""

    def __init__(self, tokens: Sequence[AddedToken], preparation: Preparation) -> None:
        self._normalize = normalize = preparation.normalize
        self._add_prefix_space = preparation.add_prefix_space
        self.is_idle = not (tokens or normalize or preparation.add_prefix_space)
        self._raw = _Finder({token.content: token.id for token in tokens if not token.normalized})
        self._normalized = _Finder(
            {(normalize(t.content) if normalize else t.content): t.id for t in tokens if t.normalized}
        )

    def split(self, text: str) -> Iterator[str | int]:
        """The text's stretches, ready to be split by the pattern, and the ids of the added tokens between them."""
        for found in self._raw.split(without_surrogates(text)):
            if isinstance(found, int):
                yield found
                continue
            for part in self._normalized.split(self._normalize(found) if self._normalize else found):
                needs_space = self._add_prefix_space and isinstance(part, str) and not part.startswith(" ")
                yield f" {part}" if needs_space else part


class _Finder:
    """The occurrences of some literals in a text."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._literals = regex.compile("|".join(map(regex.escape, longest_first))) if ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text, never an empty stretch of it, and the ids of the literals in it."""
        begin = 0
        for match in self._literals.finditer(text) if self._literals else ():
            if match.start() > begin:
                yield text[begin : match.start()]
            yield self._ids[match.group()]
            begin = match.end()
        if begin < len(text):
            yield text[begin:]


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for every lone surrogate, which JSON can name and UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
