"""Memory that a server on a CPU needs besides the KV-cache. This module does not import torch.

The processes of a server share one memory limit, so the first worker plans for all processes. Memory in use after its
imports is measured. The plan adds weights, LoRA adapters of --lora, the largest step, KV-cache for one context of at
most 1,024 tokens, the API process, and a standby worker as large as the worker's imports.
"""

import logging
from typing import NamedTuple

from model.config import ModelConfig
from model.system.limits import available_memory_bytes, memory_limit_bytes, own_anonymous_bytes
from service.config.settings import ModelSettings

logger = logging.getLogger(__name__)

_MIB = 2**20
# The API process takes 32 MiB idle and 51 MiB while it sends 64 responses with logprobs; the tokenizer and metrics
# grow by 12 MiB (proportional set sizes, Python 3.12, kvasir-9m).
_SERVICE_BYTES = 64 * _MIB
# Rows of hidden size per token: hidden states, norms, queries, keys, values and attention output of one layer.
_HIDDEN_COPIES = 8
# Rows of MLP size per token: gate, up and their product.
_MLP_COPIES = 3
# Rows of hidden size per token and expert: the inputs, as they are and quantized.
_EXPERT_COPIES = 2
_FLOAT32_BYTES = 4
# Bytes per logit with prompt logprobs: in float32, and in bfloat16 before. Logprobs are taken row by row.
_LOGIT_BYTES = 6
# Margin for fragmentation of the allocator.
_STEP_MARGIN = 1.25
# Results become Python objects: 64 prompts of 512 tokens with 5 top logprobs took 57 MiB besides the tensors.
_RESULT_BYTES = 64 * _MIB
# Largest share of free memory for the KV-cache, used if one full context needs more than half.
CACHE_SHARE = 0.8
# Tokens of context that must fit. A longer context that does not fit is rejected with the length that fits.
_SHORT_CONTEXT = 1024


class MemoryPlan(NamedTuple):
    """Bytes to keep free when the KV-cache is sized, and whether a standby worker is wanted and fits."""

    reserved_bytes: int
    has_standby: bool


class ServerNeeds(NamedTuple):
    """Facts about the server that decide how much memory a worker may take."""

    standby: bool  # a standby worker is wanted
    num_blocks: int  # KV-cache blocks of the first worker, which a replacement gets too; 0 for the first
    adapter_bytes: int = 0  # memory in which the adapters of --lora are loaded, after the model
    num_workers: int = 1  # --devices
    worker_index: int = 0  # number of the worker, from 0


class LoadedModel(NamedTuple):
    """Model as a worker will load it: bytes per number, copies of the matrices, and context length."""

    config: ModelConfig
    value_bytes: int  # of one weight
    cache_value_bytes: int  # of one number in the KV-cache
    num_copies: int  # of every matrix; 2 if native kernels pack matrices besides the loaded matrices
    max_context_length: int  # tokens of prompt and completion together
    num_quantized: int = 0  # weights that are quantized in the checkpoint
    quantized_bytes: int = 0  # of these weights, while the model is loaded
    packs_embedding: bool = False  # no copy of a tied embedding stays beside the packed output matrix

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights. A tied embedding may count twice: for row lookup, and as packed output matrix."""
        config, has_copy = self.config, self.config.tie_embeddings and not self.packs_embedding
        tied = config.vocab_size * config.hidden_size if has_copy else 0
        looked_up = config.vocab_size * config.num_layers * (config.layer_input_size or 0)  # never packed
        num_floats = self.num_copies * (config.num_parameters - self.num_quantized - looked_up) + looked_up
        return self.value_bytes * (num_floats + tied) + self.quantized_bytes

    @property
    def short_cache_bytes(self) -> int:
        """Bytes of KV-cache for one full context, or for 1,024 tokens of a longer context."""
        return min(self.max_context_length, _SHORT_CONTEXT) * self.config.kv_bytes_per_token(self.cache_value_bytes)


def step_bytes(config: ModelConfig, max_batched_tokens: int) -> int:
    """Estimate the bytes of the largest step: `max_batched_tokens` prompt tokens, with a prompt logprob for each."""
    values = _HIDDEN_COPIES * max(config.hidden_size, config.num_heads * config.largest_head_dim)
    values += _MLP_COPIES * config.largest_mlp_size
    values += config.num_layers * (config.layer_input_size or 0)
    if (experts := config.experts) is not None:
        values += experts.num_per_token * (_EXPERT_COPIES * config.hidden_size + _MLP_COPIES * experts.mlp_size)
    token_bytes = values * _FLOAT32_BYTES + config.vocab_size * _LOGIT_BYTES
    return round(_STEP_MARGIN * max_batched_tokens * token_bytes) + _RESULT_BYTES


def plan_memory(model: LoadedModel, settings: ModelSettings, server: ServerNeeds) -> MemoryPlan:
    """Return the memory plan of a server, called in the first worker before it loads the model.

    A wanted standby worker that does not fit is omitted, with a warning.

    Raises:
        ValueError: the server would run out of memory.
    """
    available, limit = available_memory_bytes(), memory_limit_bytes()
    imports_bytes, num_others = own_anonymous_bytes(), server.num_workers - 1
    working_bytes = step_bytes(model.config, settings.max_batched_tokens) + server.adapter_bytes
    reserved = working_bytes + _SERVICE_BYTES + num_others * (imports_bytes + model.weight_bytes + working_bytes)
    needed = model.weight_bytes + reserved + server.num_workers * round(model.short_cache_bytes / CACHE_SHARE)
    if needed > available:
        raise ValueError(_too_little(needed, available, limit, server))
    standby_bytes = imports_bytes if server.standby else 0
    if needed + standby_bytes > available:
        logger.warning(
            "no standby worker: memory is short by %d MiB; replacing a dead worker will take longer; "
            "free or add memory, or use --no-standby",
            _mebibytes(needed + standby_bytes - available),
        )
        return MemoryPlan(reserved, has_standby=False)
    return MemoryPlan(reserved + standby_bytes, has_standby=server.standby)


def _too_little(needed: int, available: int, limit: int | None, server: ServerNeeds) -> str:
    """Return the error message of a server that does not fit into memory, with remedies."""
    model, smaller = "this model needs", "lower --max-batched-tokens, or use a smaller model"
    if server.num_workers > 1:
        model, smaller = f"{server.num_workers} workers with this model need", f"lower --devices, {smaller}"
    if server.adapter_bytes:
        model = f"this model needs, with {_mebibytes(server.adapter_bytes)} MiB for LoRA adapters,"
        smaller = "give fewer adapters by --lora, lower --max-batched-tokens, or use a smaller model"
    if limit is None:
        return (
            f"{available // _MIB} MiB of memory are available and {model} at least {_mebibytes(needed)} MiB: "
            f"free memory, {smaller}"
        )
    return (
        f"the memory limit is {limit // _MIB} MiB and {model} at least "
        f"{_mebibytes(limit - available + needed)} MiB: raise the limit (docker --memory, MEMORY in compose), {smaller}"
    )


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)
