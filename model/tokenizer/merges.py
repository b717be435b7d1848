"""When a list of merges and a table of ranks are the same byte-pair encoding.

Two programs make tokens of a piece of text. Hugging Face's `tokenizers` joins a neighbouring pair only if that pair
stands in a list of merges, the earliest in the list first. tiktoken joins any neighbouring pair whose bytes together
are a token, the token of the lowest rank first, and takes a piece that is a token as it stands. Both prefer the
leftmost of equals.

They agree on every piece if each token has one pair that its own bytes are always joined from. Say that listed merging
of the bytes of token t ends in t, last joining the pair p(t); all p(t) are listed, and tiktoken ranks tokens in the
order of their p(t). Then:

1. Whenever two neighbours x, y in any piece have together the bytes of t, (x, y) is p(t). For no join so far has
   crossed the borders of that stretch; so inside it the same joins have been made in the same order as if it were
   alone; alone it passes through exactly one state of two parts, p(t). (For tiktoken by induction over the length.)
2. So in every state both programs see the same joinable pairs, in the same order, and take the same one.
3. A token whose own bytes do not end in it is never joined at all, by 1. It appears only as a whole piece, where the
   program looks those up: tiktoken does, `tokenizers` if `ignore_merges` is set. Without it such a token is left out
   of the ranks.

`canonical_merges` finds p(t) for all t in one pass over the list. That the bytes of t end in the listed pair (x, y) is
checked along their border alone: undo the joins of x and y in reverse order, latest first, and see at each state that
the two tokens at the border had no earlier merge with each other.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from model.tokenizer.alphabet import CHARACTER_OF

_NUM_BYTES = 256


class NotEquivalentError(ValueError):
    """A list of merges has no equal table of ranks. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanonicalMerges:
    """What a list of merges comes to.

    pairs: p(t) of every token that merging makes, in the order of their ranks.
    whole_pieces: the rest of the vocabulary, which merging never makes.
    """

    pairs: list[tuple[str, str]]
    whole_pieces: list[str]

    @property
    def tokens(self) -> list[str]:
        """The multi-byte tokens that merging makes, in the order of their ranks."""
        return [left + right for left, right in self.pairs]


class _Border:
    """Numbered tokens and the pairs they are joined from; numbers grow with rank, single bytes are below 256."""

    def __init__(self) -> None:
        self.left = [0] * _NUM_BYTES
        self.right = [0] * _NUM_BYTES
        self.joined: dict[tuple[int, int], int] = {}

    def add(self, x: int, y: int) -> int:
        """Give the next number to the token that is made of this pair."""
        number = len(self.left)
        self.joined[x, y] = number
        self.left.append(x)
        self.right.append(y)
        return number

    def holds(self, x: int, y: int) -> bool:
        """Whether the bytes of x and y, merged together, become x and y before anything crosses their border."""
        left, right, joined = self.left, self.right, self.joined
        while x >= _NUM_BYTES or y >= _NUM_BYTES:
            y_was_last = y >= x  # of equals the left one is joined first
            if y_was_last:
                last, y = y, left[y]
            else:
                last, x = x, right[x]
            crossing = joined.get((x, y))
            if crossing is not None and (crossing < last or (crossing == last and y_was_last)):
                return False
        return True


def canonical_merges(vocabulary: Collection[str], merges: Iterable[tuple[str, str]]) -> CanonicalMerges:
    """The tokens that these merges make, ranked, and those they do not; a character of the alphabet is a byte.

    Raises:
        NotEquivalentError: a single byte is no token, or a merge stands twice or before those of its parts.
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
            ):  # of two that are equal the last one counts
                raise NotEquivalentError(f"the merge of {left!r} and {right!r} stands twice")
            continue
        x, y = numbers.get(left), numbers.get(right)
        if x is None or y is None:
            early.append(merge)
        elif token in vocabulary and border.holds(x, y):
            numbers[token] = border.add(x, y)
            pairs.append(merge)
    for left, right in early:
        if left in numbers and right in numbers and left + right in vocabulary and left + right not in numbers:
            raise NotEquivalentError(f"the merge of {left!r} and {right!r} comes before those of its parts")
    return CanonicalMerges(pairs=pairs, whole_pieces=[token for token in vocabulary if token not in numbers])


def merges_of_ranks(tokens: Sequence[str]) -> CanonicalMerges:
    """The merges that give what tiktoken gives, of tokens in the order of their ranks.

    Of all the ways to split a token in two, the one that happens is found as above.

    Raises:
        NotEquivalentError: no list of merges gives that.
    """
    known = set(tokens)
    splits = ((token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token)))
    return canonical_merges(known, [(left, right) for left, right in splits if left in known and right in known])


def is_joined_by_ranks(ranks: Mapping[bytes, int], token: bytes) -> bool:
    """Whether joining by ranks the bytes of a token that has none ends in two parts: with a rank it would be made."""
    return len(join_by_ranks(ranks.get, token)) == 2


def join_by_ranks(rank_of: Callable[[bytes], int | None], piece: bytes) -> Sequence[bytes]:
    """What tiktoken makes of a piece that is no token: the slow, obvious way."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = ((rank_of(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1))
        best = min(((rank, i) for rank, i in pairs if rank is not None), default=None)
        if best is None:
            return parts
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
