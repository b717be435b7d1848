"""Memory of the machine that a server on a CPU needs beside the KV-cache. Torch-free.

A server is several processes within one memory limit. The worker plans for all of them, once its libraries are imported
and before it reads the weights, since it alone knows the device and the dtype. What was used by then (main, LitServe's
queue process, this worker's imports) is measured. What comes later is computed from the model and the settings:

    weights          as they are computed with, a tied embedding twice, and what kernels pack later
    largest step     --max-batched-tokens rows of hidden states and logits, see `step_bytes`
    one context      of the KV-cache
    API process      forked from main later
    standby worker   the same imports as this worker's, left out where they do not fit
"""

import logging
from typing import NamedTuple

from model.config import ModelConfig
from model.system.limits import (
    available_memory_bytes,
    memory_limit_bytes,
    own_anonymous_bytes,
)
from service.settings import ModelSettings

logger = logging.getLogger(__name__)

_MIB = 2**20
# The API process takes 32 MiB idle and 51 MiB while it sends 64 answers with log-probabilities; the tokenizer, metrics
# and the queue process grow by 12 MiB (proportional set sizes, Python 3.12, kvasir-9m).
_SERVICE_BYTES = 64 * _MIB
# Of hidden states, their norms, queries, keys, values and results of attention, a token and layer.
_HIDDEN_COPIES = 8
# Of the MLP's inner rows, a token: gate, up and their product.
_MLP_COPIES = 3
_FLOAT32_BYTES = 4
# A logit of a token whose successor is scored: itself and its log-probability in float32, and one comparison.
_LOGIT_BYTES = 9
# The allocator keeps freed memory in pieces that not every tensor fits into.
_STEP_MARGIN = 1.25
# Results become Python objects: 64 prompts of 512 tokens with 5 log-probabilities each took 57 MiB beside the tensors.
_RESULT_BYTES = 64 * _MIB
# Of the free memory that one context may take, as in `service.engine_builder`: the rest is margin.
_CACHE_SHARE = 0.8
# A longer context that does not fit is rejected with the length that would.
_SHORT_CONTEXT = 1024


class MemoryPlan(NamedTuple):
    """Memory that the KV-cache leaves to everything else, and whether a standby fits."""

    reserved_bytes: int
    has_standby: bool


class ServerNeeds(NamedTuple):
    """A server around the worker that builds an engine.

    standby: whether a standby worker is wanted.
    num_blocks: of the KV-cache on a CPU, as the first worker has planned it; 0 for the first worker. A worker that
        replaced another must not find less room than the first one did.
    """

    standby: bool
    num_blocks: int


class LoadedModel(NamedTuple):
    """A model as it is going to be loaded.

    value_bytes: of a weight.
    cache_value_bytes: of a number in the KV-cache.
    num_copies: of every matrix, 2 where native kernels pack them beside the loaded ones. Packing a model of 168 million
        parameters took 2.1 (bfloat16) to 2.5 times (float32) its weights at the peak.
    max_context_length: in tokens.
    """

    config: ModelConfig
    value_bytes: int
    cache_value_bytes: int
    num_copies: int
    max_context_length: int

    @property
    def weight_bytes(self) -> int:
        """Return the size of all weights. A tied embedding is looked up in rows, and packed as the output matrix."""
        config = self.config
        tied = config.vocab_size * config.hidden_size if config.tie_embeddings else 0
        return self.value_bytes * (self.num_copies * config.num_parameters + tied)

    @property
    def short_cache_bytes(self) -> int:
        """Return the KV-cache of one context of at most 1,024 tokens."""
        return min(self.max_context_length, _SHORT_CONTEXT) * self.config.kv_bytes_per_token(self.cache_value_bytes)


def step_bytes(config: ModelConfig, max_batched_tokens: int) -> int:
    """Return the memory of the largest step: every token of a prompt is computed, and its successor scored."""
    values = _HIDDEN_COPIES * max(config.hidden_size, config.num_heads * config.head_dim)
    values += _MLP_COPIES * config.mlp_size
    token_bytes = values * _FLOAT32_BYTES + config.vocab_size * _LOGIT_BYTES
    return round(_STEP_MARGIN * max_batched_tokens * token_bytes) + _RESULT_BYTES


def plan_memory(model: LoadedModel, settings: ModelSettings, *, standby: bool) -> MemoryPlan:
    """Return the plan of a server whose worker has imported its libraries and loads this model next.

    Args:
        standby: whether a standby worker is wanted. It is left out, with a warning, where it does not fit.

    Raises:
        ValueError: the server would be killed for memory; the message has the memory that it needs.
    """
    available, limit = available_memory_bytes(), memory_limit_bytes()
    reserved = step_bytes(model.config, settings.max_batched_tokens) + _SERVICE_BYTES
    needed = model.weight_bytes + reserved + round(model.short_cache_bytes / _CACHE_SHARE)
    if needed > available:
        raise ValueError(_too_little(needed, available, limit))
    standby_bytes = own_anonymous_bytes() if standby else 0
    if needed + standby_bytes > available:
        logger.warning(
            "no standby worker: with one the server needs %d MiB more than are available; "
            "a worker that dies is replaced more slowly",
            _mebibytes(needed + standby_bytes - available),
        )
        return MemoryPlan(reserved, has_standby=False)
    return MemoryPlan(reserved + standby_bytes, has_standby=standby)


def _too_little(needed: int, available: int, limit: int | None) -> str:
    """Return why a server does not fit, and the remedies."""
    smaller = "lower --max-batched-tokens, or take a smaller model"
    if limit is None:
        return (
            f"{available // _MIB} MiB of memory are available and this model needs at least {_mebibytes(needed)} MiB: "
            f"free some, {smaller}"
        )
    return (
        f"the memory limit is {limit // _MIB} MiB and this model needs at least "
        f"{_mebibytes(limit - available + needed)} MiB: raise the limit (docker --memory, MEMORY in compose), {smaller}"
    )


def _mebibytes(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)
