"""The tokenizer interface, independent of the library that implements it. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from model.io.one_line_error import error_line


class TokenizerError(ValueError):
    """A tokenizer file is missing, damaged, unknown or unsuitable, or a text cannot be encoded.

    The message is one line with the file, the problem and the remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(error_line(message))


class Tokenizer(Protocol):
    """Conversion of text to token ids and back.

    The implementations are `ByteLevelTokenizer` (tiktoken) and `LibraryTokenizer` (the `tokenizers` library).
    """

    @property
    def vocab_size(self) -> int:
        """The highest id plus one. Unused ids below it have no bytes and an empty name."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Name and id of each special token. Special tokens add no text to a completion."""

    @property
    def bos_token_id(self) -> int | None:
        """The BOS token, which is put before a prompt; None if prompts begin without a special token."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The EOS tokens: any of these ids ends a text. May be empty."""

    @property
    def longest_token(self) -> int | None:
        """Maximum number of text bytes that one token covers, special tokens excepted; None if there is no limit."""

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text, without the BOS token.

        Lone surrogates become U+FFFD. JSON can escape lone surrogates, but UTF-8 cannot encode them.

        Args:
            parse_special: parse the name of a special token in the text as that token. By default such a name is
                ordinary text, because a user must not be able to inject special tokens. Rendered chat templates
                need True.

        Raises:
            TokenizerError: the tokenizer cannot encode the text.
        """

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of these ids, with special tokens by name and invalid UTF-8 as U+FFFD.

        Raises:
            IndexError: an id is not in the vocabulary.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a non-empty text; b"" for a special token.

        Raises:
            IndexError: the id is not in the vocabulary.
        """

    def format_token_name(self, token_id: int) -> str:
        """Return the text to show for a single token: its text with invalid UTF-8 as U+FFFD, or its special name.

        Raises:
            IndexError: the id is not in the vocabulary.
        """
