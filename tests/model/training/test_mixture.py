"""Training order and batches: each document once per epoch, weights kept, and reproducible batches."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.training.data.batches import ROUND_BATCHES, UNTRAINED, Batch, Batches, Mixture, Piece, TokenizedSource


def tokenized(lengths: list[int], *, first: int = 0, repeats: float = 1.0, trained: bool = True) -> TokenizedSource:
    """Return a source with documents of these lengths, of consecutive token ids between two BOS tokens (9,999).

    trained: if False, the loss mask is False at odd positions.
    """
    ids = [[9999, *range(first + sum(lengths[:i]), first + sum(lengths[:i]) + n), 9999] for i, n in enumerate(lengths)]
    flat = np.array(list(itertools.chain.from_iterable(ids)), dtype=np.uint16)
    return TokenizedSource(
        token_ids=flat,
        starts=np.cumsum([0, *map(len, ids)]),
        trained=(np.arange(len(flat)) % 2 == 0) | trained,
        repeats=repeats,
    )


def mixture(sources: list[TokenizedSource], length: int = 8, rounds: int = 64, seed: int = 1, tag: int = 0) -> Mixture:
    return Mixture(sources, piece_length=length, round_length=rounds, seed=seed, tag=tag)


def first_targets(pieces: list[Piece]) -> Counter[int]:
    return Counter(int(piece.targets[0]) for piece in pieces)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 50))
def test_every_piece_occurs_once_before_any_occurs_twice(lengths: list[int], piece: int, rounds: int) -> None:
    source = tokenized(lengths)
    mixed = mixture([source], length=piece, rounds=rounds)
    pieces = sum(-(-(n + 1) // piece) for n in lengths)
    seen: Counter[tuple[int, ...]] = Counter()
    for number in range(40):
        seen.update((*p.inputs.tolist(), int(p.targets[-1])) for p in mixed.round(number))
        assert len(seen) <= pieces
        assert max(seen.values()) <= 1 + (min(seen.values()) if len(seen) == pieces else 0)


def test_consecutive_pieces_of_a_document_have_no_gap() -> None:
    (source,) = [tokenized([20])]
    pieces = {int(p.inputs[0]): p for p in mixture([source], length=8).round(0)}
    first, second, third = pieces[9999], pieces[7], pieces[15]
    assert first.inputs.tolist() == [9999, *range(7)]
    assert first.targets.tolist() == [*range(8)]
    assert second.targets.tolist() == [*range(8, 16)]
    assert third.targets.tolist() == [16, 17, 18, 19, 9999]


def test_sources_are_mixed_by_their_repeats() -> None:
    often, seldom = tokenized([9] * 40, repeats=3.0), tokenized([9] * 40, first=5000, repeats=0.5)
    mixed = mixture([often, seldom, tokenized([9], first=8000, repeats=0.0)], rounds=400)
    assert mixed.shares == pytest.approx([6 / 7, 1 / 7])
    tokens = Counter(int(p.targets[0]) >= 5000 for number in range(20) for p in mixed.round(number))
    assert tokens[True] / tokens.total() == pytest.approx(1 / 7, rel=0.02)
    assert mixed.epoch_length == 3 * 400 + 200


def test_rounds_depend_on_seed_and_phase_alone() -> None:
    source = tokenized([5, 9, 30, 1, 12])

    def inputs(number: int, **changes: int) -> list[list[int]]:
        return [piece.inputs.tolist() for piece in mixture([source], **changes).round(number)]

    assert inputs(3) == inputs(3)
    assert inputs(3) != inputs(4)
    assert inputs(0) != inputs(0, seed=2)
    assert inputs(0) != inputs(0, tag=1)


def test_sources_without_text_are_rejected() -> None:
    with pytest.raises(ValueError, match="no text to learn from"):
        mixture([tokenized([5], repeats=0.0)])


def batches(source: TokenizedSource, *, documents: bool, length: int = 8, rows: int = 2) -> Batches:
    limit = length if documents else 10**6
    mixed = mixture([source], length=limit, rounds=ROUND_BATCHES * length * rows)
    return Batches(mixed, sequence_length=length, batch_size=rows, documents=documents)


def sequences(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    starts = batch.starts_N.tolist()
    parts = (batch.inputs_T.tolist(), batch.targets_T.tolist(), batch.positions_T.tolist())
    return [tuple(part[a:b] for part in parts) for a, b in itertools.pairwise(starts)]  # type: ignore[misc]


@pytest.mark.parametrize("documents", [True, False])
def test_batches_are_full_and_equal_in_any_order_of_access(documents: bool) -> None:
    source = tokenized([5, 9, 30, 1, 12])
    forward, backward = (batches(source, documents=documents) for _ in range(2))
    wanted = [forward.batch(number) for number in range(3 * ROUND_BATCHES)]
    for number in reversed(range(len(wanted))):
        got = backward.batch(number)
        assert all(getattr(got, name).equal(getattr(wanted[number], name)) for name in Batch._fields)
        assert got.inputs_T.shape == got.targets_T.shape == got.positions_T.shape == (16,)
        assert got.starts_N[0] == 0
        assert got.starts_N[-1] == 16


def test_packed_documents_are_cut_only_where_a_batch_ends() -> None:
    packed = batches(tokenized([3, 9, 1, 5]), documents=True)
    for number in range(ROUND_BATCHES):
        parts = sequences(packed.batch(number))
        for place, (inputs, targets, positions) in enumerate(parts):
            assert positions == list(range(len(inputs)))
            assert inputs[1:] == targets[:-1]
            assert 9999 not in inputs[1:]
            assert len(inputs) <= 8
            if place:  # within a batch a sequence starts a document, or a piece of a longer document
                assert inputs[0] == 9999 or inputs[0] == 10


def test_sequences_are_consecutive_tokens_of_a_stream() -> None:
    packed = batches(tokenized([3, 9, 1, 5]), documents=False)
    for number in range(ROUND_BATCHES):
        for inputs, targets, positions in sequences(packed.batch(number)):
            assert len(inputs) == 8
            assert positions == list(range(8))
            assert all(b == a or a == 9999 for a, b in zip(targets[:-1], inputs[1:], strict=True))


@pytest.mark.parametrize("documents", [True, False])
def test_targets_outside_the_loss_mask_are_untrained(documents: bool) -> None:
    source = tokenized([4, 6], trained=False)
    follows = {int(a): int(b) for a, b in itertools.pairwise(source.token_ids) if int(a) != 9999}
    learned = {int(b) for b, is_trained in zip(source.token_ids, source.trained, strict=True) if is_trained}
    batch = batches(source, documents=documents).batch(0)
    checked = 0
    for token, target in zip(batch.inputs_T.tolist(), batch.targets_T.tolist(), strict=True):
        if token != 9999 and follows[token] != 9999:  # the delimiter is a target at some positions only
            assert target == (follows[token] if follows[token] in learned else UNTRAINED)
            checked += 1
    assert checked > 5
    assert UNTRAINED in batch.targets_T
