"""Learning a byte-level BPE: merge the most frequent neighbouring pair, again and again.

Sennrich et al. 2016 (arXiv 1508.07909), over bytes as in GPT-2 (Radford et al. 2019, section 2.2). Words are counted
once and merged as a table, with an index from each pair to the words that hold it and a heap of pairs whose stale
entries are passed over, so that a merge costs only the words it touches.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable

import regex

from model.tokenizer.byte_level import ByteLevelTokenizer

END_OF_TEXT = "<|endoftext|>"
CHAT_MARKS = ("<|im_start|>", "<|im_end|>")  # ChatML's: what begins and ends a message

# Contractions, words with one leading space or mark, up to two digits, punctuation runs, line breaks, spaces: the
# shape of tiktoken's cl100k pattern, but with short digit groups, since a small vocabulary cannot hold all of three.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+"
)

# What has no spaces, such as DNA, is counted in parts: each merge reads all of every word that it touches.
_LONGEST_WORD = 64

Pair = tuple[int, int]


def train_bpe(texts: Iterable[str], vocab_size: int, *, chat: bool = False) -> ByteLevelTokenizer:
    """A tokenizer of at most `vocab_size` tokens: 256 bytes, merges, an end-of-text mark and, for `chat`, ChatML's two.

    Deterministic: of equally frequent pairs the one of lower ids merges first. Stops early when no pair occurs twice.

    Raises:
        ValueError: `vocab_size` cannot hold the bytes and the marks.
    """
    marks = (END_OF_TEXT, *(CHAT_MARKS if chat else ()))
    smallest = 256 + len(marks)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size}: the 256 bytes and the {', '.join(marks)} mark need {smallest}")
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
    special_tokens = {mark: len(tokens) + index for index, mark in enumerate(marks)}
    end = special_tokens[END_OF_TEXT]
    return ByteLevelTokenizer(
        pattern=SPLIT_PATTERN,
        ranks=ranks,
        special_tokens=special_tokens,
        eos_token_ids=(end, special_tokens[CHAT_MARKS[1]]) if chat else (end,),
        bos_token_id=end,  # in training every text follows the mark of the one before
    )


def _merges(words: Counter[str], num_merges: int) -> Iterable[Pair]:
    """The pairs to merge, in order; merge i makes token 256 + i."""
    # Sorted, so that equal corpora in another order give equal tokenizers.
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
            continue  # stale: the count has changed since, and a newer entry stands in the heap
        if -negative < 2:
            return
        joined = tokens[pair[0]] + tokens[pair[1]]
        if joined in made:
            continue  # two ways to the same bytes: an encoding maps bytes to one id
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
    """`ids` with each occurrence of `pair`, left to right, made `new_id`."""
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
