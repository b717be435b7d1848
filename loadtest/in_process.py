"""The service's engine, and the bare model below it, in this process. Imports torch."""

import time
from dataclasses import dataclass
from typing import Any, Self

import torch

from model.attention.interface import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint import load_model
from model.kv_cache import KVCache
from model.manifest import Manifest, read_manifest
from model.tokenizer.files import load_tokenizer
from model.transformer import Transformer
from service.engine.engine import Engine
from service.engine_builder import EngineFacts, build_engine
from service.settings import ModelSettings

_MIN_STEPS = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class InProcess:
    """An engine built from settings exactly as the worker builds its own."""

    engine: Engine
    manifest: Manifest
    built: EngineFacts
    settings: ModelSettings

    @classmethod
    def open(cls, settings: ModelSettings) -> Self:
        """Build it.

        Raises:
            CheckpointError: the checkpoint cannot be used.
            ValueError: the settings cannot be met on this machine.
        """
        manifest = read_manifest(settings.checkpoint)
        engine, built = build_engine(settings, manifest)
        return cls(engine, manifest, built, settings)

    @property
    def max_context_tokens(self) -> int:
        return self.manifest.config.max_context_length

    @property
    def facts(self) -> dict[str, Any]:
        """What was measured, JSON-ready."""
        return {
            "name": self.manifest.name,
            "parameters": self.manifest.config.num_parameters,
            "context": self.max_context_tokens,
            "device": self.built.device,
            "dtype": self.built.dtype,
            "weights": self.built.dtype,
            "attention": self.built.attention,
            "threads": self.built.threads,
            "max_num_running": self.settings.max_num_running,
            "max_batched_tokens": self.settings.max_batched_tokens,
            "block_size": self.built.block_size,
            "kv_cache_tokens": self.built.num_blocks * self.built.block_size,
        }

    def token_ids(self, text: str) -> list[int]:
        """The text in this model's tokens."""
        return load_tokenizer(self.manifest.directory).encode(text)

    def bare_model(self) -> "BareModel":
        """The same weights without an engine around them."""
        dtype = _DTYPES[self.built.dtype]
        backend = ATTENTION_BACKENDS["eager" if self.built.attention == "eager" else "sdpa"]
        model = load_model(self.manifest, device=self.built.device, dtype=dtype, attention=backend)
        return BareModel(model, block_size=self.built.block_size, dtype=dtype, device=self.built.device)


class BareModel:
    """Decode steps of the model alone, over a batch that never changes: no scheduler, no text, no preparing of
    inputs, argmax for a sampler. What the engine's decode is measured against.
    """

    def __init__(self, model: Transformer, *, block_size: int, dtype: torch.dtype, device: str) -> None:
        self._model = model
        self._block_size = block_size
        self._dtype = dtype
        self._device = device

    @torch.inference_mode()
    def decode_tokens_per_second(self, *, batch_size: int, context_length: int, seconds: float) -> float:
        """Tokens a second over steps of one token for every sequence, at this context length, for so long."""
        blocks_each = -(-context_length // self._block_size)
        num_blocks = batch_size * blocks_each
        kv_cache = KVCache(
            self._model.config,
            num_blocks=num_blocks,
            block_size=self._block_size,
            dtype=self._dtype,
            device=self._device,
        )
        tables_BN = torch.arange(num_blocks, device=self._device).view(batch_size, blocks_each)
        last = context_length - 1
        metadata = AttentionMetadata(
            query_lengths=(1,) * batch_size,
            context_lengths=(context_length,) * batch_size,
            positions_T=torch.full((batch_size,), last, device=self._device),
            slot_mapping_T=tables_BN[:, last // self._block_size] * self._block_size + last % self._block_size,
            block_tables_BN=tables_BN,
        )
        ids_T = torch.zeros(batch_size, dtype=torch.int64, device=self._device)
        ids_T = self._step(ids_T, metadata, kv_cache)
        num_steps, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds or num_steps < _MIN_STEPS:
            ids_T = self._step(ids_T, metadata, kv_cache)
            num_steps += 1
        return batch_size * num_steps / elapsed

    def _step(self, ids_T: torch.Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> torch.Tensor:
        ids_T = self._model(ids_T, metadata, kv_cache).argmax(dim=-1)
        ids_T.tolist()  # the engine needs the numbers too: waits for the device
        return ids_T
