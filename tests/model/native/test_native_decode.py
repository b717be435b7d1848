"""Decode step in one native call: bitwise identical to `hidden` and `logits`."""

import ctypes
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.native.native_transformer import Decoded, NativeTransformer
from model.nn.linear import replace_linears
from model.nn.transformer import Block
from tests.model.configs import VARIANTS, build
from tests.model.kernel_libraries import BUILDABLE, library_of

BEST = list(BUILDABLE)[:1]
SIZE, ROWS, BLOCKS = 4, 3, 40
VOCABULARY = 290  # token ids with logits; 300 have an embedding


class Steps:
    """Decode steps of three sequences, computed by `decode` and by `hidden` with `logits`, with equal caches."""

    def __init__(self, level: str, variant: str, *, kind: str = "plain", width: int = 8) -> None:
        library = library_of(level)
        model = build(VARIANTS[variant]).to(torch.bfloat16)
        attention = NativeAttention(library)
        for block in model.layers:
            cast(Block, block).attention.backend = attention
        if kind != "plain":
            replace_linears(model, kind)
        self.model = NativeTransformer(model, library)
        self.caches = [self._cache(), self._cache()]
        self.ids_T = torch.tensor([5, 6, 7])
        self.contexts_B = torch.tensor([2, 3, 9])
        self.positions_T, self.slots_T = self.contexts_B - 1, torch.zeros(ROWS, dtype=torch.int64)
        # Both paths must read the same values from repeated blocks.
        self.tables_BN = torch.randperm(BLOCKS).repeat(ROWS * width // BLOCKS + 1)[: ROWS * width].view(ROWS, width)
        self._place()

    def _cache(self) -> KVCache:
        return KVCache(self.model.config, num_blocks=BLOCKS, block_size=SIZE, dtype=torch.bfloat16, device="cpu")

    def _place(self) -> None:
        blocks_B = self.tables_BN[torch.arange(ROWS), self.positions_T // SIZE]
        self.slots_T.copy_(blocks_B * SIZE + self.positions_T % SIZE)

    @property
    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(
            query_lengths=(1,) * ROWS,
            context_lengths=tuple(self.contexts_B.tolist()),
            positions_T=self.positions_T,
            slot_mapping_T=self.slots_T,
            block_tables_BN=self.tables_BN,
            contexts_B=self.contexts_B,
        )

    def one_call(self) -> Decoded | None:
        return self.model.decode(self.ids_T, self.metadata, self.caches[0], num_ids=VOCABULARY)

    def two_calls(self) -> Tensor:
        metadata = replace(self.metadata, contexts_B=None)
        return self.model.logits(self.model.hidden(self.ids_T, metadata, self.caches[1]))[:, :VOCABULARY]

    def move_on(self, ids: list[int], *, by: int = 1) -> None:
        self.ids_T.copy_(torch.tensor(ids))
        self.contexts_B += by
        self.positions_T += by
        self._place()


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("rotary-gqa", "plain"),
        ("rotary-gqa", "int8"),
        ("rotary-gqa", "int4"),
        ("gpt2", "plain"),
        ("alibi", "plain"),
        ("relative-bias", "plain"),
    ],
)
def test_a_decode_call_has_the_bits_of_hidden_and_logits(level: str, variant: str, kind: str) -> None:
    """The steps cross block boundaries, with one and with two threads."""
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            steps = Steps(level, variant, kind=kind)
            for number in range(12):
                torch.set_num_threads(1 + number // 6)
                ids, logits_BV = steps.one_call() or pytest.fail("decode computed nothing")
                expected_BV = steps.two_calls()
                assert torch.equal(logits_BV, expected_BV)
                assert ids == expected_BV.argmax(dim=-1).tolist()
                steps.move_on(ids)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("level", BEST)
def test_a_decode_call_with_invalid_ids_or_slots_computes_nothing(level: str) -> None:
    """`decode` returns None, or raises an error if it prepares its arguments. No memory outside is read or written."""
    with torch.inference_mode():
        steps = Steps(level, "rotary-gqa")
        assert steps.one_call() is not None
        for tensor, wrong in ((steps.ids_T, 300), (steps.slots_T, BLOCKS * SIZE), (steps.tables_BN, -1)):
            right = tensor.clone()
            tensor.view(-1)[-1] = wrong
            keys = torch.stack(steps.caches[0].keys)
            if tensor is steps.ids_T:
                assert steps.one_call() is None
            else:
                assert steps.one_call() is None  # the arguments were prepared while all inputs were valid
                with pytest.raises(ValueError, match=r"the KV-cache has .* but the step uses"):
                    steps.one_call()
            assert torch.equal(keys, torch.stack(steps.caches[0].keys))
            tensor.copy_(right)
            assert steps.one_call() is not None
        without_contexts = replace(steps.metadata, contexts_B=None)
        assert steps.model.decode(steps.ids_T, without_contexts, steps.caches[0], num_ids=VOCABULARY) is None


@pytest.mark.parametrize("level", BEST)
@pytest.mark.parametrize("variant", ["rotary-gqa", "relative-bias"])
def test_a_position_past_the_tables_grows_the_tables(level: str, variant: str) -> None:
    """The tables of rotations and biases hold 256 positions. `decode` computes nothing in the step that needs more."""
    with torch.inference_mode():
        steps = Steps(level, variant, width=70)
        missed = []
        for by in (243, 1, 1, 1, 1, 1, 1):
            decoded = steps.one_call()
            expected_BV = steps.two_calls()
            if decoded is None:
                missed.append(int(steps.contexts_B[2]))
                one, other = ((*cache.keys, *cache.values) for cache in steps.caches)
                for pool, right in zip(one, other, strict=True):
                    pool.copy_(right)
            else:
                assert torch.equal(decoded.logits_BV, expected_BV)
            steps.move_on(expected_BV.argmax(dim=-1).tolist(), by=by)
        assert missed == [257]


@pytest.mark.parametrize("level", BUILDABLE)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 256, 300, 1000])
def test_the_most_likely_id_is_the_first_of_the_highest_logits(level: str, size: int) -> None:
    """As in NumPy, the first of equal maxima is returned. For a row with NaN or infinity the id is -1."""
    find = library_of(level).function("kvasir_most_likely", ctypes.c_void_p, ctypes.c_int64, result=ctypes.c_int64)
    rng = np.random.default_rng(size)
    inf, nan = np.inf, np.nan
    for values in ([1.0], [0.0, 1.0, 2.0], [-1.0, -inf], [inf, 0.0], [nan, inf, 1.0], [-inf], [-0.0, 0.0]):
        for _ in range(10):
            logits = rng.choice(np.array(values, dtype=np.float32), size)
            expected = logits.argmax() if np.isfinite(logits).all() else -1
            assert find(logits.ctypes.data, size) == expected
    for odd in (nan, inf, -inf):
        logits = rng.normal(size=size).astype(np.float32)
        logits[rng.integers(size)] = odd
        assert find(logits.ctypes.data, size) == -1
    logits = rng.normal(size=size).astype(np.float32)
    assert find(logits.ctypes.data, size) == logits.argmax()
