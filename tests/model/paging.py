"""Forward passes of a model over a paged KV-cache without the engine: scattered blocks, chunks of any size."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.native.native_transformer import NativeTransformer
from model.nn.transformer import Transformer

BLOCK_SIZE = 4


class PagedRun:
    """Sequences whose KV-cache blocks are scattered and interleaved in one pool. cache_dtype: None for the model's."""

    def __init__(
        self,
        model: Transformer | NativeTransformer,
        sequences: Sequence[Tensor],
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        weight = model.token_embedding.weight
        self.model = model
        self.device = weight.device
        self.sequences = sequences
        needs = [-(-len(ids) // BLOCK_SIZE) for ids in sequences]
        self.num_blocks = sum(needs) + 3
        blocks = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self.tables = [[blocks.pop() for _ in range(need)] for need in needs]
        self.cache = KVCache(
            model.config,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            dtype=weight.dtype,
            device=weight.device,
            cache_dtype=cache_dtype,
        )

    def forward_in_chunks(self, chunk: int) -> list[Tensor]:
        """Return the logits of all tokens of each sequence, computed at most `chunk` tokens per sequence and step."""
        done = [0] * len(self.sequences)
        logits: list[list[Tensor]] = [[] for _ in self.sequences]
        while rows := [row for row, ids in enumerate(self.sequences) if done[row] < len(ids)]:
            ends = {row: min(done[row] + chunk, len(self.sequences[row])) for row in rows}
            out_TV = self.model(
                torch.cat([self.sequences[row][done[row] : ends[row]] for row in rows]).to(self.device),
                self._metadata(rows, done, ends).to(self.device),
                self.cache,
            )
            for row, part in zip(rows, out_TV.split([ends[row] - done[row] for row in rows]), strict=True):
                logits[row].append(part)
                done[row] = ends[row]
        return [torch.cat(parts) for parts in logits]

    def _metadata(self, rows: list[int], done: list[int], ends: dict[int, int]) -> AttentionMetadata:
        positions = [torch.arange(done[row], ends[row]) for row in rows]
        slots = [
            self.tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for row in rows
            for position in range(done[row], ends[row])
        ]
        width = max(len(self.tables[row]) for row in rows)
        tables = [self.tables[row] + [0] * (width - len(self.tables[row])) for row in rows]
        return AttentionMetadata(
            query_lengths=tuple(ends[row] - done[row] for row in rows),
            context_lengths=tuple(ends[row] for row in rows),
            positions_T=torch.cat(positions),
            slot_mapping_T=torch.tensor(slots),
            block_tables_BN=torch.tensor(tables),
        )
