"""Byte-level BPE training: repeatedly merge the most frequent adjacent pair.

Sennrich et al. 2016 (arXiv 1508.07909), over bytes as in GPT-2 (Radford et al. 2019, section 2.2). Merges run on a
table of distinct words and their counts. An index maps each pair to the words that contain it, so a merge visits only
these words. A heap orders the pairs; its stale entries are skipped.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

import regex

from model.tokenizer.byte_level import ByteLevelTokenizer

END_OF_TEXT = "<|endoftext|>"
CHAT_MARKS = ("<|im_start|>", "<|im_end|>")  # ChatML's start and end of a message

# Contractions, words with one leading space or punctuation character, up to two digits, punctuation runs, line breaks,
# spaces: as tiktoken's cl100k pattern, but a small vocabulary cannot hold all groups of three digits.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Longer words (text without spaces, such as DNA) are split, since each merge scans every word that it changes.
_LONGEST_WORD = 64

Pair = tuple[int, int]


def train_bpe(texts: Iterable[str], vocab_size: int, *, chat: bool = False) -> ByteLevelTokenizer:
    """Train a tokenizer of at most `vocab_size` tokens.

    The vocabulary is 256 bytes, the merges, `<|endoftext|>` and, if `chat`, ChatML's two special tokens. Training is
    deterministic: of equally frequent pairs, the pair with the lower ids merges first. It stops early when no pair
    occurs twice.

    Raises:
        ValueError: `vocab_size` is too small for the bytes and the special tokens.
    """
    specials = (END_OF_TEXT, *(CHAT_MARKS if chat else ()))
    smallest = 256 + len(specials)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {', '.join(specials)} need at least {smallest}"
        )
    words = Counter[str]()
    split = regex.compile(SPLIT_PATTERN)
    for text in texts:
        words.update(split.findall(text))
    for word in [word for word in words if len(word) > _LONGEST_WORD]:
        count = words.pop(word)
        for start in range(0, len(word), _LONGEST_WORD):
            words[word[start : start + _LONGEST_WORD]] += count
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in _merges(words, vocab_size - smallest):
        tokens.append(tokens[left] + tokens[right])
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special_tokens = {special: len(tokens) + index for index, special in enumerate(specials)}
    end = special_tokens[END_OF_TEXT]
    return ByteLevelTokenizer(
        pattern=SPLIT_PATTERN,
        ranks=ranks,
        special_tokens=special_tokens,
        eos_token_ids=(end, special_tokens[CHAT_MARKS[1]]) if chat else (end,),
        bos_token_id=end,  # in training, each text follows the end-of-text token of the previous text
    )


def _merges(words: Counter[str], num_merges: int) -> Iterable[Pair]:
    """Yield the pairs to merge, in order; merge i creates token 256 + i."""
    # Sorted, so that the tokenizer does not depend on the order of the texts.
    table = sorted(words.items())
    pieces = [list(word.encode("utf-8", "replace")) for word, _ in table]
    counts = [count for _, count in table]
    pair_counts: defaultdict[Pair, int] = defaultdict(int)
    pair_words: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, ids in enumerate(pieces):
        for pair in itertools.pairwise(ids):
            pair_counts[pair] += counts[index]
            pair_words[pair].add(index)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    made: set[bytes] = set()
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < 256 + num_merges and heap:
        negative, pair = heapq.heappop(heap)
        if -negative != pair_counts[pair]:
            continue  # stale: the count changed, and the heap has a newer entry
        if -negative < 2:
            return
        joined = tokens[pair[0]] + tokens[pair[1]]
        if joined in made:
            continue  # an earlier merge created the same bytes, which must have one id
        made.add(joined)
        tokens.append(joined)
        yield pair
        changed: set[Pair] = set()
        for index in pair_words.pop(pair):
            before = pieces[index]
            after = _merge(before, pair, len(tokens) - 1)
            for ids, sign in ((before, -1), (after, 1)):
                for neighbours in itertools.pairwise(ids):
                    pair_counts[neighbours] += sign * counts[index]
                    changed.add(neighbours)
            for neighbours in itertools.pairwise(after):
                pair_words[neighbours].add(index)
            pieces[index] = after
        pair_counts.pop(pair, None)
        for neighbours in changed - {pair}:
            if pair_counts[neighbours] > 0:
                heapq.heappush(heap, (-pair_counts[neighbours], neighbours))


def _merge(ids: list[int], pair: Pair, new_id: int) -> list[int]:
    """Replace each occurrence of `pair`, left to right, by `new_id`."""
    merged = []
    position = 0
    while position < len(ids):
        if position + 1 < len(ids) and (ids[position], ids[position + 1]) == pair:
            merged.append(new_id)
            position += 2
        else:
            merged.append(ids[position])
            position += 1
    return merged
