"""What every tokenizer can do, whichever library stands behind it. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from model.error_line import error_line


class TokenizerError(ValueError):
    """A tokenizer's files are missing, damaged, unknown or do not fit. One line: the file, the thing, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(error_line(message))


class Tokenizer(Protocol):
    """Text to token ids and back.

    Two implement it: `ByteLevelTokenizer` (tiktoken) and `LibraryTokenizer` (the `tokenizers` library).
    """

    @property
    def vocab_size(self) -> int:
        """The highest id plus one. Ids below it may stand for nothing: they have no bytes and an empty name."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Name and id of each control mark. They have no text of their own: completions leave them out."""

    @property
    def bos_token_id(self) -> int | None:
        """The mark that is put before a prompt; None puts none."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of which any ends a text; there may be none."""

    @property
    def longest_token(self) -> int | None:
        """The most bytes of a text without control marks that one token stands for; None where there is no most."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of a text, without the mark that begins a prompt.

        Args:
            parse_special: take what looks like a control mark as one. By default it is ordinary text, because a
                user's text must not be able to speak with the model's control voice; a rendered chat template does.

        Lone surrogates, which no UTF-8 can hold but JSON can name, become U+FFFD.

        Raises:
            TokenizerError: the text is beyond the tokenizer's means.
        """

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids, special tokens by name, bytes that are no UTF-8 as U+FFFD.

        Raises:
            IndexError: an id is not in the vocabulary.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text that stands already; none for a special token.

        Raises:
            IndexError: the id is not in the vocabulary.
        """

    def token_name(self, token_id: int) -> str:
        """How to show a token alone: its text, with broken characters as U+FFFD, or a special token's name.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
