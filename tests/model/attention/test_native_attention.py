"""The native attention kernel equals the reference implementation on every CPU level, and is batch-invariant."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from model.attention.backends import EagerAttention
from model.attention.kv_cache import KVCache, rounded
from model.attention.metadata import AttentionForm, AttentionMetadata, ScoreBias
from model.attention.native import NativeAttention
from model.attention.score_biases import AlibiBias, DisentangledBias, RelativeBias, relative_positions
from model.attention.sdpa import SdpaAttention
from tests.model.configs import VARIANTS
from tests.model.kernel_libraries import BUILDABLE, library_of

BEST = list(BUILDABLE)[:1]
# Query heads, key/value heads, head size, block size.
SHAPES = [
    (4, 4, 16, 4),
    (9, 3, 64, 16),
    (6, 1, 7, 3),
    (3, 3, 80, 16),
    (2, 2, 256, 64),
    (50, 1, 8, 5),
    (2, 1, 33, 1),
    (2, 1, 512, 16),
]
# Groups of 1, 2, 3, 4 and 8 query heads.
GROUPS = [(3, 3, 64, 16), (4, 2, 128, 16), SHAPES[1], (4, 1, 128, 16), (8, 1, 256, 16), (16, 2, 64, 16)]
# Queries and context of each sequence: decodes and chunks, at the edges of tiles (128) and of splits (512).
LENGTHS = ((1, 1), (1, 17), (1, 128), (1, 129), (3, 127), (40, 130), (64, 64), (1, 513), (20, 600))
FORM = AttentionForm(layer=1, scale=0.2, window=None, bias=None)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def native(way: str) -> NativeAttention:
    return NativeAttention(library_of(way))


@dataclass(frozen=True)
class Scene:
    """Sequences whose first tokens are cached in scattered blocks, and the tokens of the sequences' next step.

    shape: numbers of query heads and key/value heads, head size, block size.
    lengths: for each sequence, the tokens of the step and the length of the context with them.
    unwritten: content of unused slots. cache_dtype: dtype of the cache; None: `dtype`.
    """

    shape: tuple[int, int, int, int]
    lengths: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    unwritten: float = torch.nan
    cache_dtype: torch.dtype | None = None
    texts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # q, k, v of each context

    def __post_init__(self) -> None:
        heads, kv_heads, size, _ = self.shape
        for number, (_, context) in enumerate(self.lengths):
            generator = torch.Generator().manual_seed(number)
            sizes = ((context, heads, size), (context, kv_heads, size), (context, kv_heads, size))
            q, k, v = (torch.randn(size, generator=generator).to(self.dtype) for size in sizes)
            self.texts.append((q, k, v))

    def attend(
        self,
        backend: NativeAttention | EagerAttention | SdpaAttention,
        form: AttentionForm = FORM,
        rows: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return the attention output of the step's tokens for the sequences with the indices `rows`; None: all."""
        rows = range(len(self.lengths)) if rows is None else rows
        heads, kv_heads, size, block_size = self.shape
        changes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size, "num_layers": 2}
        config = dataclasses.replace(VARIANTS["none"], **changes)
        needs = [-(-self.lengths[row][1] // block_size) for row in rows]
        cache = KVCache(
            config,
            num_blocks=sum(needs) + 2,
            block_size=block_size,
            dtype=self.dtype,
            device="cpu",
            cache_dtype=self.cache_dtype,
        )
        pools = cache.keys + cache.values, cache.key_scales + cache.value_scales
        for pool in pools[cache.cache_dtype is torch.int8]:
            pool.fill_(self.unwritten)
        blocks = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(len(rows))).tolist()
        tables = [[blocks.pop() for _ in range(need)] for need in needs]
        slots = []
        for row, table in zip(rows, tables, strict=True):
            queries, context = self.lengths[row]
            of = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(context)])
            cache.write(form.layer, of[:-queries], *(x[:-queries] for x in self.texts[row][1:]))
            slots.append(of[-queries:])
        metadata = AttentionMetadata(
            query_lengths=tuple(self.lengths[row][0] for row in rows),
            context_lengths=tuple(self.lengths[row][1] for row in rows),
            positions_T=torch.cat([torch.arange(c - q, c) for q, c in (self.lengths[row] for row in rows)]),
            slot_mapping_T=torch.cat(slots),
            block_tables_BN=torch.tensor([table + [0] * (max(needs) - len(table)) for table in tables]),
        )
        q, k, v = (torch.cat([self.texts[row][which][-self.lengths[row][0] :] for row in rows]) for which in range(3))
        out = backend.attend(q, k, v, form=form, metadata=metadata, kv_cache=cache)
        for row, of in zip(rows, slots, strict=True):
            for which, held in enumerate(cache.gather(form.layer, of), start=1):
                written = rounded(self.texts[row][which][-len(of) :], cache.cache_dtype).to(self.dtype)
                assert torch.equal(held.nan_to_num(), written.nan_to_num()), "they are written"
        return list(out.split(list(metadata.query_lengths)))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> None:
    for mine, oracles in zip(actual, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), oracles.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def biases_of(shape: tuple[int, int, int, int]) -> dict[str, ScoreBias | None]:
    """Return the score biases none, T5's and ALiBi's for this number of heads, by name."""
    config = dataclasses.replace(
        VARIANTS["relative-bias"], num_heads=shape[0], num_kv_heads=shape[1], head_dim=shape[2]
    )
    table = relative_positions(config)
    assert table is not None
    torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(0))
    return {"none": None, "relative": RelativeBias(config, table), "alibi": AlibiBias(config, None)}


# Every shape on the best level, some shapes on the other levels.
ORACLE_CASES = [
    (way, shape) for way in BUILDABLE for shape in (dict.fromkeys(SHAPES + GROUPS) if way in BEST else SHAPES[:3])
]

INVARIANCE_CASES = [
    (way, shape) for way in BUILDABLE for shape in (GROUPS + SHAPES[2:3] if way in BEST else SHAPES[1:3])
]


@functools.cache
@torch.no_grad()
def references(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[tuple[AttentionForm, list[Tensor]]]:
    """Return forms of attention, each with the reference's outputs for `LENGTHS`, the same for all levels."""
    scene, biases = Scene(shape, LENGTHS, dtype), biases_of(shape)
    kinds = ((None, "none", None), (100, "none", 0.5), (5, "relative", 0.5), (None, "alibi", None))
    forms = [
        AttentionForm(layer=1, scale=0.2, window=window, bias=biases[name], soft_cap=cap) for window, name, cap in kinds
    ]
    return [(form, scene.attend(EagerAttention(), form)) for form in forms]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("way", "shape"), ORACLE_CASES)
@torch.no_grad()
def test_native_attention_equals_the_reference(way: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    scene = Scene(shape, LENGTHS, dtype, unwritten=0.0 if way == "none" else torch.nan)
    for form, expected in references(shape, dtype):
        if dtype is torch.bfloat16 and way == "none" and form.bias is not None:
            continue  # PyTorch rounds a bias to the dtype, which is far from the reference if the bias is large
        for mine, oracles in zip(scene.attend(native(way), form), expected, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.float(), oracles.float(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("way", "shape"), INVARIANCE_CASES)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(
    way: str, shape: tuple[int, int, int, int], dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    """The work on few sequences is divided among threads by heads, then by parts of the contexts."""
    scene = Scene(shape, (*LENGTHS, (1, 1600)), dtype)
    form = AttentionForm(layer=1, scale=0.2, window=None, bias=biases_of(shape)["alibi"])
    set_threads(1)
    together = scene.attend(native(way), form)
    for threads, row in [(1, 0), (1, 5), *((threads, row) for threads in (2, 5) for row in (1, 6, 8, 9))]:
        set_threads(threads)
        (alone,) = scene.attend(native(way), form, [row])
        assert torch.equal(alone, together[row]), (threads, scene.lengths[row])
    for mine, expected in zip(scene.attend(native(way), form), together, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("way", "shape", "window"),
    [(way, shape, None) for way, shape in INVARIANCE_CASES] + [(way, SHAPES[0], 70) for way in BUILDABLE],
)
def test_decoded_tokens_and_prompt_chunks_have_the_same_bits(
    way: str, shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    """Few query rows are multiplied while keys are read; many rows use keys packed once for all of them."""
    form = AttentionForm(layer=1, scale=0.2, window=window, bias=None)
    length = 600
    (whole,) = Scene(shape, ((length, length),), dtype).attend(native(way), form)
    for queries, context in ((1, 1), (1, 127), (2, 128), (1, 129), (13, 130), (1, 512), (1, 513), (1, length)):
        scene = Scene(shape, ((queries, length),), dtype)
        cut = [(q[:context], k[:context], v[:context]) for q, k, v in scene.texts]
        (part,) = dataclasses.replace(scene, lengths=((queries, context),), texts=cut).attend(native(way), form)
        assert torch.equal(part, whole[context - queries : context]), (queries, context)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", BUILDABLE)
def test_unsupported_layers_use_sdpa(way: str) -> None:
    shape, lengths = (4, 2, 16, 4), ((1, 9), (5, 20))
    config = dataclasses.replace(VARIANTS["disentangled-gqa"], head_dim=16)
    content = DisentangledBias(config, relative_positions(config))
    double = Scene(shape, lengths, torch.float64, unwritten=0.0)
    single = Scene(shape, lengths, unwritten=0.0)
    wide = Scene((1, 1, 528, 4), lengths, unwritten=0.0)
    deberta = AttentionForm(layer=1, scale=0.2, window=None, bias=content)
    with torch.no_grad():
        for scene, form in ((double, FORM), (single, deberta), (wide, FORM)):
            ours, theirs = (scene.attend(backend, form) for backend in (native(way), SdpaAttention()))
            assert all(map(torch.equal, ours, theirs))
        q, k, v = torch.randn(3, 7, 2, 8).unbind(0)
        metadata = AttentionMetadata.uncached((7,))
        calls = (b.attend(q, k, v, form=FORM, metadata=metadata, kv_cache=None) for b in (native(way), SdpaAttention()))
        assert torch.equal(*calls)


@pytest.mark.parametrize("way", BUILDABLE)
@pytest.mark.parametrize(
    ("slot", "block", "context"), [(8, 0, 1), (-1, 0, 1), (0, 2, 1), (0, -1, 1), (0, 0, 5)], ids=str
)
def test_slots_and_blocks_outside_the_cache_are_rejected(way: str, slot: int, block: int, context: int) -> None:
    cache = KVCache(VARIANTS["none"], num_blocks=2, block_size=4, dtype=torch.float32, device="cpu")
    metadata = AttentionMetadata(
        query_lengths=(1,),
        context_lengths=(context,),
        positions_T=torch.tensor([context - 1]),
        slot_mapping_T=torch.tensor([slot]),
        block_tables_BN=torch.tensor([[block]]),
    )
    with pytest.raises(ValueError, match=r"the KV-cache has \d+ blocks of \d+ slots, but the step uses"):
        native(way).attend(
            torch.ones(1, 4, 8), torch.ones(1, 2, 8), torch.ones(1, 2, 8), form=FORM, metadata=metadata, kv_cache=cache
        )


@pytest.mark.parametrize("way", BUILDABLE)
def test_queries_and_keys_may_be_slices_of_wider_rows(way: str) -> None:
    """If one matrix computes queries, keys and values, these are slices of the rows of its output."""
    cache = KVCache(VARIANTS["none"], num_blocks=2, block_size=4, dtype=torch.float32, device="cpu")
    metadata = AttentionMetadata(
        query_lengths=(3,),
        context_lengths=(3,),
        positions_T=torch.arange(3),
        slot_mapping_T=torch.arange(3),
        block_tables_BN=torch.tensor([[0]]),
    )
    qkv_TX = torch.randn(3, 8 * (4 + 2 + 2), generator=torch.Generator().manual_seed(0))
    parts = [torch.unflatten(x, -1, (-1, 8)) for x in torch.split(qkv_TX, [32, 16, 16], dim=-1)]
    attend = native(way).attend
    wide = attend(*parts, form=FORM, metadata=metadata, kv_cache=cache)
    assert torch.equal(wide, attend(*(x.contiguous() for x in parts), form=FORM, metadata=metadata, kv_cache=cache))
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in parts]
    assert torch.equal(wide, attend(*turned, form=FORM, metadata=metadata, kv_cache=cache))


@pytest.mark.parametrize("way", BUILDABLE)
def test_a_nan_in_a_key_or_value_gives_nan(way: str) -> None:
    scene = Scene((2, 2, 8, 4), ((1, 9), (1, 9)))
    scene.texts[0][1][3, 0, 2] = torch.nan
    damaged, whole = scene.attend(native(way))
    assert damaged[0, 0].isnan().all()
    assert damaged[0, 1].isfinite().all(), "the other head"
    assert whole.isfinite().all()
