"""Tokenizer that encodes with the `tokenizers` library, for every supported decoder. Torch-free.

It serves the tokenizers that tiktoken cannot run: SentencePiece's BPE and unigram models with byte fallback (Llama 2,
Mistral, Gemma), character tokenizers, and byte-level BPE that is not provably equivalent to tiktoken's.

The library encodes. Decoding is implemented here, because the library's decoding cannot be streamed. Here, a token
adds its own bytes to the text, whatever its neighbours are.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from model.tokenizer.added_tokens import AddedToken, without_surrogates
from model.tokenizer.alphabet import to_characters
from model.tokenizer.decoders import TokenDecoder
from model.tokenizer.interface import TokenizerError
from model.tokenizer.vocabulary import Vocabulary

_LONGEST_REASON = 200
_CHARACTER_BYTES = 4  # of UTF-8, at most


class LibraryTokenizer(Vocabulary):
    """A tokenizer of the `tokenizers` library; see `interface.Tokenizer`.

    Args:
        text: the content of a tokenizer.json.
        decoder: the decoder that the file describes.
        special_tokens: name and id of each special token.
        eos_token_ids, bos_token_id: the EOS tokens, and the BOS token if there is one.
        added_tokens: the tokens that the file adds by name.
        alphabet: the characters that have tokens. A text with any other character is rejected, because the library
            would drop the character silently, or raise an error that does not name it. For a byte-level vocabulary,
            the characters that stand for bytes. None if the library drops nothing.
        is_bounded: True if `longest_token` is known; see `bounds`.

    Raises:
        TokenizerError: the library rejects the file or would assign another id to a token, an added token normalizes
            to nothing, or the BOS or an EOS token is not in the vocabulary.
    """

    def __init__(
        self,
        text: str,
        *,
        decoder: TokenDecoder,
        special_tokens: dict[str, int],
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
        added_tokens: Sequence[AddedToken] = (),
        alphabet: frozenset[str] | None = None,
        is_bounded: bool = False,
    ) -> None:
        self._library = _guarded(lambda: tokenizers.Tokenizer.from_str(text))
        self._library.encode_special_tokens = True  # names of special tokens in a text are text
        self._library.no_truncation()
        self._library.no_padding()
        self._check_added_tokens(added_tokens)
        self._decoder = decoder
        self._alphabet = alphabet
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        marks = set(special_tokens.values())
        token_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token_id in set(vocabulary.values()) - marks:
            # Not the vocabulary key: a normalized added token stands for its normalized text.
            token_bytes[token_id] = decoder.token_bytes(self._library.id_to_token(token_id))
        super().__init__(token_bytes, special_tokens, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
        self._longest_token = max(_CHARACTER_BYTES, *map(len, token_bytes)) if is_bounded else None

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `interface.Tokenizer`.

        Raises:
            TokenizerError: the library cannot encode the text, for example a character without a token.
        """
        clean = without_surrogates(text)
        if self._alphabet is not None:
            self._check_nothing_is_dropped(clean, self._alphabet)
        library = self._with_marks if parse_special else self._library
        token_ids: list[int] = _guarded(lambda: library.encode(clean, add_special_tokens=False)).ids
        return token_ids

    @cached_property
    def _with_marks(self) -> tokenizers.Tokenizer:
        """Return a second library tokenizer, which parses special tokens in a text.

        Threads share both tokenizers, so the setting of one tokenizer cannot be switched per call.
        """
        library = tokenizers.Tokenizer.from_str(self.to_json())
        library.encode_special_tokens = False
        return library

    def to_json(self) -> str:
        """Return the tokenizer.json that the library writes."""
        return str(self._library.to_str())

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `interface.Tokenizer`. Remove the space that such tokenizers put before a text."""
        return self._decoder.strip_start(self.bytes_of(token_ids)).decode("utf-8", "replace")

    def _check_added_tokens(self, added_tokens: Sequence[AddedToken]) -> None:
        """Raise TokenizerError for an added token that the library would handle differently from the file.

        The library ignores the ids in the file for tokens outside the vocabulary and numbers them in file order. It
        matches a token with empty normalized text everywhere.
        """
        for token in added_tokens:
            if (actual := self._library.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"the added token {token.content!r} has the id {token.id}, but the tokenizers library assigns "
                    f"{actual}, because lower ids are missing; add a token for each missing id"
                )
            if token.normalized and not self._normal(token.content):
                raise TokenizerError(
                    f"the added token {token.content!r} is empty after normalization; set its normalized to false"
                )

    def _check_nothing_is_dropped(self, text: str, alphabet: frozenset[str]) -> None:
        for character in dict.fromkeys(self._normal(text)):
            symbols = to_characters(character.encode()) if self._decoder.byte_level else character
            if not alphabet.issuperset(symbols) and (self._decoder.byte_level or not character.isspace()):
                raise TokenizerError(f"the tokenizer has no token for {character!r}; remove this character")

    def _normal(self, text: str) -> str:
        normalizer = self._library.normalizer
        return text if normalizer is None else str(_guarded(lambda: normalizer.normalize_str(text)))


def _guarded(call: Callable[[], Any]) -> Any:
    """Call the library, and raise its errors, which have no type of their own, as TokenizerError."""
    try:
        return call()
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise TokenizerError(f"the tokenizers library reports an error: {reason[:_LONGEST_REASON]}") from error
