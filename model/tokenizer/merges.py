"""Equivalence of a list of merges and a table of ranks, the two forms of a byte-pair encoding.

Two libraries split a piece of text into tokens. Hugging Face's `tokenizers` merges a neighbouring pair only if the
pair is in a list of merges; the pair listed first is merged first. tiktoken merges any neighbouring pair if its joined
bytes are a token; the pair with the lowest rank is merged first. tiktoken never splits a piece that is a token. Of
equal pairs, both libraries merge the leftmost.

The libraries agree on every piece under the following condition. For each token t, merging its own bytes by the list
ends in t. Call the last pair merged p(t). Every p(t) is in the list, and tiktoken ranks the tokens in the order of
their p(t). Proof:

1. If two neighbours x and y in any piece together have the bytes of t, then (x, y) is p(t). No merge so far has crossed
   the borders of that stretch. So the merges inside the stretch are those of the stretch alone, in the same order.
   Alone, the stretch passes through exactly one state of two parts, p(t). (For tiktoken, by induction over the length.)
2. So both libraries see the same mergeable pairs in the same order in every state, and merge the same pair.
3. By 1, a token is never merged if merging its own bytes does not end in it. Such a token appears only as a whole
   piece, if the library looks up whole pieces. tiktoken does; `tokenizers` does if `ignore_merges` is set. If
   `ignore_merges` is not set, such a token is left out of the ranks.

`canonical_merges` finds p(t) for all t in one pass over the list. It must check that merging the bytes of t ends in the
listed pair (x, y). The border between x and y suffices: undo the merges of x and y, the latest first, and check in each
state that the two tokens at the border have no earlier merge with each other.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from model.tokenizer.alphabet import CHARACTER_OF

_NUM_BYTES = 256


class NotEquivalentError(ValueError):
    """A list of merges and a table of ranks are not equivalent. The message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalMerges:
    """The tokens that a list of merges produces.

    pairs: p(t) of every token t that merging produces, in rank order.
    whole_pieces: the rest of the vocabulary, which merging never produces.
    """

    pairs: list[tuple[str, str]]
    whole_pieces: list[str]

    @property
    def tokens(self) -> list[str]:
        """The multi-byte tokens that merging produces, in rank order."""
        return [left + right for left, right in self.pairs]


class _Border:
    """Numbered tokens, and the pair that each token is merged from.

    Numbers are in rank order. Single bytes have the numbers 0 to 255.
    """

    def __init__(self) -> None:
        self.left = [0] * _NUM_BYTES
        self.right = [0] * _NUM_BYTES
        self.joined: dict[tuple[int, int], int] = {}

    def add(self, x: int, y: int) -> int:
        """Assign the next number to the token that is merged from this pair, and return the number."""
        number = len(self.left)
        self.joined[x, y] = number
        self.left.append(x)
        self.right.append(y)
        return number

    def holds(self, x: int, y: int) -> bool:
        """Return True if merging the joined bytes of x and y produces x and y before any merge across their border."""
        left, right, joined = self.left, self.right, self.joined
        while x >= _NUM_BYTES or y >= _NUM_BYTES:
            y_was_last = y >= x  # of equal pairs, the left pair is merged first
            if y_was_last:
                last, y = y, left[y]
            else:
                last, x = x, right[x]
            crossing = joined.get((x, y))
            if crossing is not None and (crossing < last or (crossing == last and y_was_last)):
                return False
        return True


def canonical_merges(vocabulary: Collection[str], merges: Iterable[tuple[str, str]]) -> CanonicalMerges:
    """Return the tokens that these merges produce, in rank order, and the tokens that they never produce.

    Args:
        vocabulary, merges: tokens in the byte-level alphabet: one character a byte.

    Raises:
        NotEquivalentError: a single byte has no token, or a merge is listed twice or before the merges of its parts.
    """
    numbers = {character: byte for byte, character in CHARACTER_OF.items()}
    if missing := sum(character not in vocabulary for character in numbers):
        raise NotEquivalentError(f"{missing} single bytes have no token")
    border = _Border()
    early: list[tuple[str, str]] = []
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, right = merge
        token = left + right
        number = numbers.get(token)
        if number is not None:
            if (
                number >= _NUM_BYTES and pairs[number - _NUM_BYTES] == merge
            ):  # `tokenizers` ranks a repeated merge by its last occurrence
                raise NotEquivalentError(f"the merge of {left!r} and {right!r} is listed twice")
            continue
        x, y = numbers.get(left), numbers.get(right)
        if x is None or y is None:
            early.append(merge)
        elif token in vocabulary and border.holds(x, y):
            numbers[token] = border.add(x, y)
            pairs.append(merge)
    for left, right in early:
        if left in numbers and right in numbers and left + right in vocabulary and left + right not in numbers:
            raise NotEquivalentError(f"the merge of {left!r} and {right!r} is listed before the merges of its parts")
    return CanonicalMerges(pairs=pairs, whole_pieces=[token for token in vocabulary if token not in numbers])


def merges_of_ranks(tokens: Sequence[str]) -> CanonicalMerges:
    """Return the list of merges that is equivalent to tiktoken's ranks.

    All splits of a token into two tokens are candidates; `canonical_merges` selects the split that happens.

    Args:
        tokens: the tokens in rank order.

    Raises:
        NotEquivalentError: `canonical_merges` finds no equivalent list.
    """
    known = set(tokens)
    splits = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
    return canonical_merges(known, [(left, right) for left, right in splits if left in known and right in known])


def is_joined_by_ranks(ranks: Mapping[bytes, int], token: bytes) -> bool:
    """Return True if tiktoken would merge a token without a rank, once the token had a rank.

    That is so if merging the token's bytes by the ranks ends in two parts.
    """
    return len(join_by_ranks(ranks.get, token)) == 2


def join_by_ranks(rank_of: Callable[[bytes], int | None], piece: bytes) -> Sequence[bytes]:
    """Merge a piece that is not a token as tiktoken does. This is the slow reference implementation."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = ((rank_of(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1))
        best = min(((rank, i) for rank, i in pairs if rank is not None), default=None)
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
