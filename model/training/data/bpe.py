"""Training of a byte-level BPE tokenizer (Sennrich et al. 2016, arXiv 1508.07909) with the library `tokenizers`."""

from collections.abc import Iterable, Iterator

import regex
from tokenizers import Tokenizer as BpeLearner
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

from model.chat.chatml import END, START
from model.tokenizer.byte_level import ByteLevelTokenizer

END_OF_TEXT = "<|endoftext|>"

# Contractions, words with one leading space or punctuation character, up to two digits, punctuation runs, line breaks,
# spaces: as tiktoken's cl100k pattern, but a small vocabulary cannot hold all groups of three digits.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Longer words (text without spaces, such as DNA) are split, since each merge scans every word that it changes.
_LONGEST_WORD = 64
_SEPARATOR = b"\xff"  # between words; UTF-8 has no such byte


def train_bpe(texts: Iterable[str], vocab_size: int, *, chat: bool = False) -> ByteLevelTokenizer:
    """Train a tokenizer of `vocab_size` tokens, or of fewer if no further pair of adjacent tokens occurs twice.

    The vocabulary is 256 bytes, the merged pairs, `<|endoftext|>` and, if `chat`, ChatML's two special tokens. Training
    is deterministic: of equally frequent pairs, the pair with the lower ids merges first.

    Raises:
        ValueError: `vocab_size` is too small for the bytes and the special tokens.
    """
    specials = (END_OF_TEXT, *((START, END) if chat else ()))
    smallest = 256 + len(specials)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {', '.join(specials)} need at least {smallest}"
        )
    learner = BpeLearner(BPE())
    learner.pre_tokenizer = Split(_SEPARATOR.decode("latin-1"), "removed")
    trainer = BpeTrainer(
        vocab_size=256 + vocab_size - smallest,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=[chr(byte) for byte in range(256)],
    )
    learner.train_from_iterator(_separated(texts), trainer)
    vocabulary = learner.get_vocab()
    tokens = [token.encode("latin-1") for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special_tokens = {special: len(tokens) + index for index, special in enumerate(specials)}
    end = special_tokens[END_OF_TEXT]
    return ByteLevelTokenizer(
        pattern=SPLIT_PATTERN,
        ranks=ranks,
        special_tokens=special_tokens,
        eos_token_ids=(end, special_tokens[END]) if chat else (end,),
        bos_token_id=end,  # in training, each text follows the end-of-text token of the previous text
    )


def _separated(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text as words joined by a separator, with one character per byte: the library trains on characters."""
    split = regex.compile(SPLIT_PATTERN)
    for text in texts:
        words = (
            word[at : at + _LONGEST_WORD] for word in split.findall(text) for at in range(0, len(word), _LONGEST_WORD)
        )
        yield _SEPARATOR.join(word.encode("utf-8", "replace") for word in words).decode("latin-1")
