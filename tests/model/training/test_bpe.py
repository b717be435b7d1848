"""BPE trainer against a naive implementation, and required properties of its tokenizers."""

from collections import Counter

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from model.training.data.bpe import SPLIT_PATTERN, train_bpe


def naive_merges(texts: list[str], count: int) -> list[bytes]:
    """Recount all pairs for every merge; of equal counts the pair of lower ids merges first."""
    words = Counter(word.encode() for text in texts for word in regex.findall(SPLIT_PATTERN, text))
    tokens = [bytes([byte]) for byte in range(256)]
    table = {word: list(word) for word in words}
    banned: set[tuple[int, int]] = set()
    while len(tokens) < 256 + count:
        pairs = Counter[tuple[int, int]]()
        for word, ids in table.items():
            for i in range(len(ids) - 1):
                pairs[ids[i], ids[i + 1]] += words[word]
        candidates = [(-number, pair) for pair, number in pairs.items() if number > 1 and pair not in banned]
        if not candidates:
            break
        _, pair = min(candidates)
        joined = tokens[pair[0]] + tokens[pair[1]]
        if joined in tokens:
            banned.add(pair)
            continue
        tokens.append(joined)
        for ids in table.values():
            i = 0
            while i < len(ids) - 1:
                if (ids[i], ids[i + 1]) == pair:
                    ids[i : i + 2] = [len(tokens) - 1]
                i += 1
    return tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc é1", max_size=40), max_size=6), st.integers(0, 30))
def test_equals_the_naive_trainer(texts: list[str], merges: int) -> None:
    tokenizer = train_bpe(texts, 257 + merges)
    learned = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size - 1)]
    assert learned == naive_merges(texts, merges)


def test_frequent_words_become_single_tokens() -> None:
    tokenizer = train_bpe(["the cat and the dog and the bird"] * 5, 300)
    assert len(tokenizer.encode(" the and")) == 2
    assert tokenizer.vocab_size <= 300


def test_equal_corpora_in_another_order_give_the_same_tokenizer() -> None:
    texts = ["one fish two fish", "red fish blue fish", "this one has a little star"]
    forward, backward = train_bpe(texts, 290), train_bpe(texts[::-1], 290)
    assert forward.vocab_size == backward.vocab_size > 257
    tokens = range(forward.vocab_size)
    assert [forward.token_bytes(token) for token in tokens] == [backward.token_bytes(token) for token in tokens]


def test_a_vocabulary_without_room_for_the_bytes_is_rejected() -> None:
    with pytest.raises(ValueError, match="need at least 257"):
        train_bpe(["a"], 256)


def test_a_text_without_spaces_is_split_before_training() -> None:
    """A text without spaces, such as DNA, is split: else each merge would read the whole text."""
    whole, parts = ("ab" * 128 + "cd" * 128) * 2, ("ab" * 128, "cd" * 128)
    tokenizer = train_bpe([whole], 300)
    assert tokenizer.ranks == train_bpe([" ".join(("", *parts, *parts)).replace(" ", "\n")], 300).ranks
    assert tokenizer.decode(tokenizer.encode(whole)) == whole
