"""Messages between the API process and the worker: frozen structs without torch, and their msgpack encoding.

Commands travel API -> worker, events travel worker -> API (`service.ipc.channel`). Times are `time.monotonic()`
seconds: on Linux all processes of a machine share this clock.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TypeAlias

import msgspec

from model.sampling.params import SamplingParams


class FinishReason(StrEnum):
    """Reason for the end of a sequence. A sequence ends exactly once."""

    STOP = "stop"  # end of text, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # cancelled: the client left, or its deadline passed
    ERROR = "error"  # the server's fault; `Finish.error` says what happened
    REFUSED = "refused"  # the request's fault: its token rules left no token to sample; `Finish.error` has the details


# `Finish.error` of a sequence for which the model computed NaN or infinity. A retry of the request fails the same way.
NON_FINITE = "the model computed NaN or infinity for this request; change its prompt, or ask for another model"


class Pooling(StrEnum):
    """Pooling of a text's hidden states (after the final norm) into its embedding."""

    MEAN = "mean"  # over all tokens
    LAST = "last"  # the last token: under causal attention, only its state depends on all tokens


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to compute one completion. Each choice of a request is one `Submit` with its own uid.

    `prior_token_ids`: completion tokens that the API process already has from an earlier attempt. Generation continues
    after them.
    `attempt`: grows with each resubmission. Events of older attempts are ignored.
    `priority`: the lowest value runs first, see `service.engine.scheduling.sequence`.
    `cache_salt`, `cache_namespace`: sequences share prefixes only if both are equal. The client chooses the salt; the
    API key determines the namespace.
    `pooling`: compute the prompt's embedding and sample nothing. `params.max_tokens` is then 0.
    `grammar`: the grammar that the completion must follow, see `model.structured_output.grammar`.
    `deadline_seconds`: a sequence that has not begun by this time ends with `FinishReason.ABORT`.
    `tenant`: name of the API key, or address of the client. Slots are shared fairly among tenants.
    """

    uid: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    prior_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_seconds: float
    deadline_seconds: float | None
    priority: int = 0
    cache_salt: str = ""
    cache_namespace: str = ""
    pooling: Pooling | None = None
    grammar: str | None = None
    tenant: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to stop computing this uid. Unknown uids are ignored."""

    uid: str


class AttentionQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to compute the attention weights of these heads of one layer for a prompt. Samples no token."""

    uid: str
    token_ids: tuple[int, ...]
    layer: int
    heads: tuple[int, ...]
    attempt: int = 0


Command: TypeAlias = Submit | Cancel | AttentionQuery

# Route that LitServe requires of an application. Kvasir registers all routes itself.
API_PATH = "/v1/completions"


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Logprob of a token before temperature and filters, and the most likely alternatives.

    `logprob` and `rank` are None for the first token of a prompt, because no token precedes it.
    `rank` is 1 for the most likely token; equally likely tokens share a rank. `top` is (token id, logprob), most likely
    first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...]


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """End of a sequence, with its token counts and timings.

    `stop_reason` is the stop string or stop token id that matched, None for end-of-text and length.
    `queue_seconds`: arrival to first scheduled. `prefill_seconds`: from there to the first token, or to the end of the
    prompt if no token is sampled. `decode_seconds`: from there to the last token. A phase that never began lasts 0.
    """

    reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: the worker is about to compute this uid. Sent first, so that a crash can be attributed to the request."""

    uid: str
    attempt: int


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Output of one step for one sequence: usually one token, and the text that can be sent now.

    `index` is the number of completion tokens before this delta, prior tokens included. The receiver uses it to detect
    missing or repeated deltas. `token_ids` is empty if only `text`, `prompt_logprobs` or `finish` is new.
    `embedding`: float32 in native byte order, normalized to length 1. Comes with `finish`, if the request has
    `pooling`.
    """

    uid: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish: Finish | None
    embedding: bytes | None = None


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: a worker is ready and has no requests. Every unfinished request must be resubmitted.

    device, dtype, attention, kernel_level, kv_cache_dtype: as in `service.worker.engine_factory.EngineFacts`.
    """

    epoch: int
    device: str
    dtype: str
    attention: str
    kernel_level: str | None
    kv_cache_dtype: str
    num_blocks: int
    block_size: int
    startup_seconds: float


class AttentionResult(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Response to a `AttentionQuery`.

    `weights` are float32 in native byte order: for each head the lower triangle, row by row. Weights above the diagonal
    are 0 and omitted. None if the computation failed.
    """

    uid: str
    weights: bytes | None
    compute_seconds: float


class RunningLimitChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: the engine now runs at most this many sequences at once, see `RunningLimit`."""

    max_num_running: int


class StepStats(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: statistics of one engine step, for metrics.

    Counters are increments of this step; `kv_usage` is 0..1.
    """

    num_running: int
    max_num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_usage: float
    batch_size: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_prompt_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    step_seconds: float
    num_non_finite: int = 0


class EngineIdle(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Event: the engine has no work left. Cancelled work ends between steps, so no step reports its end."""


Event: TypeAlias = TokenDelta | WorkerReady | AttentionResult | Started | RunningLimitChanged | StepStats | EngineIdle


class CommandBatch(msgspec.Struct, frozen=True, array_like=True):
    """Commands that are sent together. Only the worker of this epoch obeys them.

    The API process sends all unfinished requests again to a new worker. So a new worker ignores what a dead worker has
    not read.
    """

    epoch: int
    commands: list[Command]


# The encoders return bytes. The decoders raise `msgspec.DecodeError` on bytes of any other message.
encode_commands: Callable[[CommandBatch], bytes] = msgspec.msgpack.Encoder().encode
decode_commands: Callable[[bytes], CommandBatch] = msgspec.msgpack.Decoder(CommandBatch).decode
encode_events: Callable[[Sequence[Event]], bytes] = msgspec.msgpack.Encoder().encode
decode_events: Callable[[bytes], list[Event]] = msgspec.msgpack.Decoder(list[Event]).decode
