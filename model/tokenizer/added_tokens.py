"""Tokens that were added to a vocabulary by name, and the search for them in a text before splitting.

The order is that of the `tokenizers` library. First, tokens with `normalized` false are searched for in the original
text. Then the text between these tokens is normalized and searched for the tokens with `normalized` true. Both
searches take the leftmost match; of matches at the same position, the longest.
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

    special: a special token; it adds no text to a completion.
    normalized: searched for in the normalized text instead of the original text.
    trimmed: the match includes adjacent spaces (lstrip, rstrip) or must be a whole word (single_word).
    """

    id: int
    content: str
    special: bool
    normalized: bool
    trimmed: bool

    @classmethod
    def mark(cls, content: str, token_id: int) -> "AddedToken":
        """Return a special token that is searched for in the original text."""
        return cls(id=token_id, content=content, special=True, normalized=False, trimmed=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, token_id: int | None = None) -> "AddedToken":
        """Read an entry of `added_tokens` in tokenizer.json or of `added_tokens_decoder` in tokenizer_config.json.

        Args:
            token_id: the id, for an entry that has no "id" (`added_tokens_decoder`).

        Raises:
            TokenizerError: the entry has no content or no id.
        """
        number, content = values.get("id", token_id), values.get("content")
        if not isinstance(number, int) or number < 0 or not isinstance(content, str) or not content:
            raise TokenizerError(f"an added token needs an id and a content, not {values!r}")
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
    """Preparation of a text before it is split into pieces.

    added_tokens: tokens to search for first; none may be trimmed.
    normalize: normalizer of the text; None: no normalization.
    add_prefix_space: put a space before each stretch between added tokens that does not begin with a space.
    """

    added_tokens: tuple[AddedToken, ...] = ()
    normalize: Normalize | None = None
    add_prefix_space: bool = False


class TextSplitter:
    """Splitter of a text at `tokens`, which also prepares the text between them."""

    def __init__(self, tokens: Sequence[AddedToken], preparation: Preparation) -> None:
        self._normalize = normalize = preparation.normalize
        self._add_prefix_space = preparation.add_prefix_space
        self.is_idle = not (tokens or normalize or preparation.add_prefix_space)
        self._raw = _Finder({token.content: token.id for token in tokens if not token.normalized})
        self._normalized = _Finder(
            {(normalize(t.content) if normalize else t.content): t.id for t in tokens if t.normalized}
        )

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a text in order: prepared text for the split pattern, and ids of added tokens."""
        for found in self._raw.split(without_surrogates(text)):
            if isinstance(found, int):
                yield found
                continue
            for part in self._normalized.split(self._normalize(found) if self._normalize else found):
                needs_space = self._add_prefix_space and isinstance(part, str) and not part.startswith(" ")
                yield f" {part}" if needs_space else part


class _Finder:
    """Search for literal strings in a text."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self._literals = regex.compile("|".join(map(regex.escape, longest_first))) if ids else None

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the parts of a text in order: non-empty text, and the id of each literal found."""
        begin = 0
        for match in self._literals.finditer(text) if self._literals else ():
            if match.start() > begin:
                yield text[begin : match.start()]
            yield self._ids[match.group()]
            begin = match.end()
        if begin < len(text):
            yield text[begin:]


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate with U+FFFD. JSON can escape lone surrogates; UTF-8 cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
