"""Tokenizer base class: vocabulary, special tokens and decoding, at once or as a stream. Torch-free."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from model.io.files import OneLineError

# Ten times the largest published vocabulary. A file may name any id, and each id below the largest takes a list entry.
MAX_IDS = 2**22


class TokenizerError(OneLineError):
    """Error of a tokenizer definition that cannot be used, or of a text that a tokenizer cannot encode."""


class Tokenizer(ABC):
    """Conversion of text to token ids and back. An id outside the vocabulary raises IndexError.

    Attributes:
        vocab_size: the highest id plus one. Unused ids below `vocab_size` have no bytes and an empty name.
        special_tokens: name and id of each special token. By default, special tokens add no text to a completion.
        eos_token_ids: ids of the EOS tokens, each of which ends a text. May be empty.
        bos_token_id: id of the BOS token, with which prompts begin; None if they begin without one. Callers put
            it before a text, except before a prompt whose chat template writes it.
        kind: algorithm, for users, such as "byte-level BPE".
        longest_token: maximum number of text bytes that one token covers, special tokens excepted; None: no limit.
    """

    def __init__(
        self,
        token_bytes: Iterable[tuple[int, bytes]],
        special_tokens: Mapping[str, int],
        *,
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        """Build the table of the bytes that each ordinary token adds to a text.

        Raises:
            TokenizerError: two tokens have the same id, an id is not in 0 to `MAX_IDS` - 1, or the BOS token or an EOS
                token is not in the vocabulary.
        """
        table: dict[int, bytes] = {}
        for token_id, token in (*token_bytes, *((token_id, b"") for token_id in special_tokens.values())):
            if token_id < 0 or token_id in table:
                raise TokenizerError(
                    f"token ids must be 0 or more and unique; {token_id} is not; correct the tokenizer's files"
                )
            if token_id >= MAX_IDS:
                raise TokenizerError(
                    f"token ids must be under {MAX_IDS:,}; {str(token_id)[:20]} is not; correct the tokenizer's files"
                )
            table[token_id] = token
        self._token_bytes = [table.get(token_id, b"") for token_id in range(max(table, default=-1) + 1)]
        self.vocab_size = len(self._token_bytes)
        for token_id in (*eos_token_ids, *([] if bos_token_id is None else [bos_token_id])):
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"the BOS or EOS id {token_id} is not in the vocabulary of {self.vocab_size} tokens; "
                    "correct the id in the tokenizer's files"
                )
        self.special_tokens = special_tokens
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = bos_token_id
        self.kind = "byte-level BPE"
        self.longest_token: int | None = max(map(len, self._token_bytes), default=1)
        self._special_names = {token_id: name for name, token_id in special_tokens.items()}

    @abstractmethod
    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text, without the BOS token. Lone surrogates become U+FFFD.

        Args:
            parse_special: parse the name of a special token in the text as that token, as rendered chat templates
                need. By default such a name is ordinary text, because a user must not be able to inject special tokens.

        Raises:
            TokenizerError: the tokenizer cannot encode the text, for example a million spaces in a row.
        """

    def find_token(self, name: str) -> int | None:
        """Return the id of the special token with this name; None if the vocabulary has no such token."""
        return self.special_tokens.get(name)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, with special tokens by name and invalid UTF-8 as U+FFFD."""
        return self._joined_bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a non-empty text; b"" for a special token."""
        if token_id < 0:
            raise IndexError(token_id)
        return self._token_bytes[token_id]

    def format_token_name(self, token_id: int) -> str:
        """Return the text to show for a token: the name of a special token, else its text, invalid UTF-8 as U+FFFD."""
        return self._special_names.get(token_id) or self.token_bytes(token_id).decode("utf-8", "replace")

    def _joined_bytes(self, token_ids: Iterable[int]) -> bytes:
        names = self._special_names
        return b"".join(names[i].encode() if i in names else self.token_bytes(i) for i in token_ids)


class StreamDecoder:
    """Incremental decoder of token ids that holds back the bytes of an incomplete character.

    The texts returned by all `push` calls and `flush`, joined, are the text that the ids add to a non-empty text.

    visible_token_ids: special tokens that add their name to the text. Other special tokens add nothing.
    """

    def __init__(self, tokenizer: Tokenizer, visible_token_ids: Iterable[int] = ()) -> None:
        self._token_bytes = token_bytes = tokenizer.token_bytes
        if names := {token_id: tokenizer.format_token_name(token_id).encode() for token_id in visible_token_ids}:
            self._token_bytes = lambda token_id: token_bytes(token_id) or names.get(token_id, b"")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._holds = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode the next token ids; return the text that they complete, up to the last complete character."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """Decode the next token id; return the text that it completes, up to the last complete character.

        Fast for ASCII.
        """
        added = self._token_bytes(token_id)
        if added.isascii() and not self._holds:
            return added.decode("ascii")
        text = self._decoder.decode(added)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """End the stream: return U+FFFD if an incomplete character is held back, else an empty text."""
        self._holds = False
        return self._decoder.decode(b"", final=True)
