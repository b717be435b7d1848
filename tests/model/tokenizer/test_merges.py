"""Check of `model.tokenizer.merges`: vocabularies that it accepts give equal results in tiktoken and `tokenizers`."""

import random

import pytest
import tiktoken
from tokenizers import Tokenizer, models

from model.tokenizer.alphabet import BYTE_OF, CHARACTER_OF, to_bytes, to_characters
from model.tokenizer.merges import NotEquivalentError, canonical_merges, is_joined_by_ranks, join_by_ranks

Merge = tuple[str, str]


def random_merges(draw: random.Random) -> tuple[list[str], list[Merge]]:
    """Generate tokens over three letters and their merges: one or several per token, sometimes out of order."""
    tokens, merges = list("abc"), list[Merge]()
    for _ in range(draw.randrange(1, 14)):
        left, right = draw.choice(tokens), draw.choice(tokens)
        if len(left + right) <= 7 and (left, right) not in merges:
            merges.append((left, right))
            if left + right not in tokens:
                tokens.append(left + right)
    if draw.random() < 0.3:
        draw.shuffle(merges)
    if draw.random() < 0.3:
        del merges[draw.randrange(len(merges)) :]
    return [*BYTE_OF, *tokens[3:]], merges


def every_word(length: int) -> list[str]:
    words = [""]
    for _ in range(length):
        words += [word + letter for word in words for letter in "abc" if len(word) == len(words[-1])]
    return words[1:]


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_what_is_accepted_is_the_same(ignore_merges: bool) -> None:
    """Every word of up to six letters, and longer words, for 600 vocabularies."""
    draw, words = random.Random(2), every_word(6)
    num_accepted = num_refused = 0
    for _ in range(600):
        tokens, merges = random_merges(draw)
        try:
            found = canonical_merges(tokens, merges)
        except NotEquivalentError:
            num_refused += 1
            continue
        ranked = [*BYTE_OF, *found.tokens]
        ranks = {to_bytes(token): rank for rank, token in enumerate(ranked)}
        if ignore_merges:
            if any(is_joined_by_ranks(ranks, token.encode()) for token in found.whole_pieces):
                num_refused += 1
                continue
            ranks |= {token.encode(): len(ranks) + n for n, token in enumerate(found.whole_pieces)}
        num_accepted += 1
        library = models.BPE(
            vocab={token: n for n, token in enumerate(tokens)}, merges=merges, ignore_merges=ignore_merges
        )
        theirs = Tokenizer(library)
        ours = tiktoken.Encoding("test", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
        for word in [*draw.sample(words, 150), *("".join(draw.choices("abc", k=30)) for _ in range(10))]:
            expected = theirs.encode(word).tokens
            assert [ours.decode([rank]) for rank in ours.encode_ordinary(word)] == expected, (merges, word)
    assert num_accepted > 200
    assert num_refused > 10


def test_the_pair_that_always_makes_a_token_is_found_among_many() -> None:
    """Llama 3's files list every way to split a token; only one of the merges is ever used."""
    tokens = [*BYTE_OF, "ab", "bc", "abc"]
    merges = [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    assert canonical_merges(tokens, merges).tokens == ["ab", "bc", "abc"]


def test_a_token_whose_own_bytes_end_elsewhere_is_never_merged() -> None:
    """bc merges first, so abc becomes a and bc, which no merge joins."""
    found = canonical_merges([*BYTE_OF, "bc", "ab", "abc"], [("b", "c"), ("a", "b"), ("ab", "c")])
    assert (found.tokens, found.whole_pieces) == (["bc", "ab"], ["abc"])
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4}
    assert is_joined_by_ranks(ranks, b"abc")  # tiktoken would join a and bc if abc had a rank
    assert join_by_ranks(ranks.get, b"ababcc") == [b"ab", b"a", b"bc", b"c"]


def test_merges_before_those_of_their_parts_are_refused() -> None:
    with pytest.raises(NotEquivalentError, match="before the merges of its parts"):
        canonical_merges([*BYTE_OF, "ab", "abc"], [("ab", "c"), ("a", "b")])


def test_a_merge_that_stands_twice_is_refused() -> None:
    with pytest.raises(NotEquivalentError, match="is listed twice"):
        canonical_merges([*BYTE_OF, "ab", "bc"], [("a", "b"), ("b", "c"), ("a", "b")])


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    with pytest.raises(NotEquivalentError, match="2 single bytes"):
        canonical_merges(list(BYTE_OF)[2:], [])


def test_the_alphabet_is_the_librarys() -> None:
    everything = bytes(range(256))
    assert to_bytes(to_characters(everything)) == everything
    assert to_bytes("two words") is None
    assert len(set(CHARACTER_OF.values())) == 256
