"""Messages between the API process (sends commands) and the worker (sends events), and their msgpack encoding.

Times are `time.monotonic()` seconds: on Linux all processes of a machine share this clock.
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
# `Finish.error` of a sequence whose adapter the worker could not read, though the API process had read it.
ADAPTER_LOST = "the files of this adapter are missing or have changed; restore them, or load the adapter again"


class Pooling(StrEnum):
    """Pooling of a text's hidden states (after the final norm) into its embedding."""

    MEAN = "mean"  # over all tokens
    LAST = "last"  # the last token: under causal attention, only its state depends on all tokens


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to compute one completion. Each choice of a request is one `Submit` with its own uid."""

    uid: str
    attempt: int = 0  # grows with each resubmission; the API process ignores events of older attempts
    prompt_token_ids: tuple[int, ...]
    prior_token_ids: tuple[int, ...] = ()  # completion tokens of an earlier attempt, after which generation continues
    params: SamplingParams
    arrival_seconds: float
    deadline_seconds: float | None = None  # a sequence that has not begun by this time ends with `FinishReason.ABORT`
    priority: int = 0  # the lowest value runs first
    cache_salt: str = ""  # chosen by the client; sequences share prefixes only if salt and namespace are equal
    cache_namespace: str = ""  # determined by the API key
    pooling: Pooling | None = None  # set to compute the prompt's embedding; `params.max_tokens` is then 0
    grammar: str | None = None  # grammar of the completion, see `model.structured_output.grammar`
    tenant: str = ""  # name of the API key, or address of the client; slots are shared fairly among tenants
    adapter: str = ""  # key of the LoRA adapter; empty: the base model


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to stop computing the sequence of a uid. The worker ignores unknown uids."""

    uid: str


class AttentionQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to compute the attention weights of some heads of one layer for a prompt, without sampling a token."""

    uid: str
    token_ids: tuple[int, ...]
    layer: int
    heads: tuple[int, ...]
    attempt: int = 0


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to load the LoRA adapter of a directory. `key`: digest that the adapter's files must have."""

    key: str
    directory: str


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Command to free a LoRA adapter that no unfinished sequence uses."""

    key: str


Command: TypeAlias = Submit | Cancel | AttentionQuery | LoadAdapter | UnloadAdapter


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Logprob and rank of a token, before temperature and filters such as top-p, and logprobs of the likeliest tokens.

    `logprob` and `rank` are None for the first token of a prompt, because no token precedes it.
    """

    token_id: int
    logprob: float | None
    rank: int | None  # 1 for the most likely token; equally likely tokens share a rank
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """End of a sequence, with token counts and timings. A phase (such as decode) that never began lasts 0 seconds."""

    reason: FinishReason
    stop_reason: str | int | None  # matched stop string or stop token id; None for end-of-text and length
    error: str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_seconds: float  # arrival to first scheduled
    prefill_seconds: float  # first scheduled to first token, or to the end of the prompt if no token is sampled
    decode_seconds: float  # first token to last token


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: the worker is about to compute a sequence. A crash can therefore be attributed to the sequence."""

    uid: str
    attempt: int


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: output of an engine step for one sequence: usually one token, and the text that the client can get now."""

    uid: str
    attempt: int
    index: int  # number of earlier completion tokens, prior tokens included; reveals missing and repeated deltas
    token_ids: tuple[int, ...]  # empty if only `text`, `prompt_logprobs` or `finish` is new
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish: Finish | None
    embedding: bytes | None = (
        None  # float32 in native byte order, Euclidean norm 1; sent with `finish` if `Submit.pooling` is set
    )


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: a worker is ready and has no requests, so the API process resubmits every unfinished request.

    The fields describe the new engine, as in `service.worker.engine_factory.EngineFacts`.
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
    fallbacks: tuple[str, ...] = ()


class AttentionResult(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: attention weights that an `AttentionQuery` asked for; None if the engine failed to compute them.

    `weights` are float32 in native byte order: for each head, the lower triangle of its matrix, row by row.
    """

    uid: str
    weights: bytes | None
    compute_seconds: float


class StepStats(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Event: statistics of one engine step, for metrics. Tokens and preemptions are those of this step alone.

    max_num_running: the engine's current limit of running sequences, which admission uses, too.
    """

    num_running: int
    max_num_running: int
    num_waiting: int
    kv_usage: float  # share of the KV-cache blocks in use, 0 to 1
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
    """Event: the engine has no sequences left. After a cancellation, no step reports this by its `StepStats`."""


Event: TypeAlias = TokenDelta | WorkerReady | AttentionResult | Started | StepStats | EngineIdle


class CommandBatch(msgspec.Struct, frozen=True, array_like=True):
    """Commands for the worker of one epoch (number of restarts). A later worker ignores them, and gets new commands."""

    epoch: int
    commands: list[Command]


# The decoders raise `msgspec.DecodeError` on the bytes of any other message.
encode_commands: Callable[[CommandBatch], bytes] = msgspec.msgpack.Encoder().encode
decode_commands: Callable[[bytes], CommandBatch] = msgspec.msgpack.Decoder(CommandBatch).decode
encode_events: Callable[[Sequence[Event]], bytes] = msgspec.msgpack.Encoder().encode
decode_events: Callable[[bytes], list[Event]] = msgspec.msgpack.Decoder(list[Event]).decode
