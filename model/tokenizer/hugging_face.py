"""Any tokenizer of the `tokenizers` library whose decoder is understood. Torch-free.

It serves what tiktoken cannot: SentencePiece's BPE and unigram models with byte fallback (Llama 2, Mistral, Gemma),
one token a character, and byte-level BPE that is not provably what tiktoken computes. Encoding is the library's own;
decoding is ours, because the library's does not stream: what a token adds to a text that stands already is its bytes.
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
        text: a tokenizer.json.
        decoder: what it says about decoding.
        special_tokens: name and id of each control mark.
        eos_token_ids, bos_token_id: the marks that end and begin a text.
        added_tokens: those that the file adds by name.
        alphabet: the only characters of which the library makes tokens, where it would drop others in silence or with
            an error that does not name them; of a byte-level vocabulary those that stand for bytes. None where nothing
            is dropped.
        is_bounded: see `bounds`.

    Raises:
        TokenizerError: the library refuses it or would give a token another id, or a mark does not exist.
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
        self._library.encode_special_tokens = True  # marks in a text are text
        self._library.no_truncation()
        self._library.no_padding()
        self._check_added_tokens(added_tokens)
        self._decoder = decoder
        self._alphabet = alphabet
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        marks = set(special_tokens.values())
        token_bytes = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token_id in set(vocabulary.values()) - marks:
            # Not its key: an added token that is looked for in normal form stands for its normal form.
            token_bytes[token_id] = decoder.token_bytes(self._library.id_to_token(token_id))
        super().__init__(token_bytes, special_tokens, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
        self._longest_token = max(_CHARACTER_BYTES, *map(len, token_bytes)) if is_bounded else None

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `interface.Tokenizer`.

        Raises:
            TokenizerError: the library cannot encode the text, such as a character that no token stands for.
        """
        clean = without_surrogates(text)
        if self._alphabet is not None:
            self._check_nothing_is_dropped(clean, self._alphabet)
        library = self._with_marks if parse_special else self._library
        token_ids: list[int] = _guarded(lambda: library.encode(clean, add_special_tokens=False)).ids
        return token_ids

    @cached_property
    def _with_marks(self) -> tokenizers.Tokenizer:
        """A second one that finds marks in a text. Threads share both, so neither is switched back and forth."""
        library = tokenizers.Tokenizer.from_str(self.to_json())
        library.encode_special_tokens = False
        return library

    def to_json(self) -> str:
        """The tokenizer.json that the library writes."""
        return str(self._library.to_str())

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `interface.Tokenizer`. The space that such tokenizers put before a text is taken off again."""
        return self._decoder.strip_start(self.bytes_of(token_ids)).decode("utf-8", "replace")

    def _check_added_tokens(self, added_tokens: Sequence[AddedToken]) -> None:
        """The library numbers them in the order of the file, whatever it says, and finds an empty one everywhere."""
        for token in added_tokens:
            if (actual := self._library.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"the added token {token.content!r} has the id {token.id}, but the tokenizers library gives it "
                    f"{actual}, for ids are missing before it; list a token for each"
                )
            if token.normalized and not self._normal(token.content):
                raise TokenizerError(
                    f"the added token {token.content!r} is looked for in normal form, and of that nothing is left; "
                    "set its normalized to false"
                )

    def _check_nothing_is_dropped(self, text: str, alphabet: frozenset[str]) -> None:
        for character in dict.fromkeys(self._normal(text)):
            symbols = to_characters(character.encode()) if self._decoder.byte_level else character
            if not alphabet.issuperset(symbols) and (self._decoder.byte_level or not character.isspace()):
                raise TokenizerError(f"the tokenizer has no token for {character!r}; leave it out")

    def _normal(self, text: str) -> str:
        normalizer = self._library.normalizer
        return text if normalizer is None else str(_guarded(lambda: normalizer.normalize_str(text)))


def _guarded(call: Callable[[], Any]) -> Any:
    """What the library gives; its errors, which have no type of their own, as ours."""
    try:
        return call()
    except BaseException as error:
        # A Rust panic is no Exception and has no importable name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise TokenizerError(f"the tokenizers library refuses it: {reason[:_LONGEST_REASON]}") from error
