"""The contract between the API process and the worker: frozen, torch-free values, and their bytes on the wire.

Commands travel API -> worker, events travel worker -> API (`event_channel`). LitServe's queue of commands is in a
manager process that unpickles and re-pickles whatever it carries, so both directions carry `bytes` (msgpack), which are
only copied. Times are `time.monotonic()` seconds: on Linux one clock for all processes of a machine.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from model.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. Each ends exactly once."""

    STOP = "stop"  # end of text, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # cancelled: the client left, or its deadline passed
    ERROR = "error"  # our fault; `Finish.error` says what happened
    REFUSED = "refused"  # the request's own fault: what it forbids left no token to draw; `Finish.error` says so


# `Finish.error` of a sequence whose numbers are NaN or infinite. The same request fails the same way again.
NON_FINITE = "the model computed NaN or infinity for this request; change its prompt, or ask for another model"


class Pooling(StrEnum):
    """Which of a text's hidden states, after the final norm, make its embedding."""

    MEAN = "mean"  # of all its tokens
    LAST = "last"  # the last token's, the only one that has seen them all


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Compute one completion. A choice of a request is one of these, with a uid of its own.

    `prior_token_ids` are completion tokens the client already has from an earlier attempt: generation goes on
    after them. `attempt` grows with each resubmission; events of older attempts are ignored.
    `priority`: lower goes first, see `service.engine.sequence`.
    `cache_salt`, `cache_namespace`: prefixes are shared only where both are equal. The client chooses the salt, the API
    key the namespace.
    `pooling`: the prompt's embedding is wanted, and nothing drawn; `params.max_tokens` is 0.
    `grammar`: what the completion has to follow, see `model.grammar`.
    `deadline_seconds`: one that has not begun by then ends as aborted. `owner`: among owners places are shared.
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
    owner: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Nobody waits for this uid any more. Unknown uids are ignored."""

    uid: str


class Look(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Tell what these tokens attend to in one layer: the weights of these heads. Not a sequence: draws nothing."""

    uid: str
    token_ids: tuple[int, ...]
    layer: int
    heads: tuple[int, ...]
    attempt: int = 0


Command: TypeAlias = Submit | Cancel | Look

# LitServe names the queue of commands by a route.
API_PATH = "/v1/completions"
# The uid under which LitServe carries commands; a request's own uid has 32 hexadecimal digits.
BUS = "bus"


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A token's log-probability under the unscaled, unfiltered model, and the most likely alternatives.

    `logprob` and `rank` are None for the first token of a prompt, which nothing precedes.
    `rank` is 1 for the most likely token; equals share one. `top` is (token id, logprob), most likely first.
    """

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[tuple[int, float], ...]


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The end of a sequence and the facts of its life. Seconds; a phase that never began is 0.

    `stop_reason` is the stop string or stop token id that matched, None for end-of-text and length.
    queue: arrival to first scheduled; prefill: to first token, or to the prompt's end where none is drawn; decode: to
    the last token.
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
    """The worker begins to compute this now. Told ahead of it, so that it is known should the worker die of it."""

    uid: str
    attempt: int


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What one step added to one sequence: usually one token, and the text that is now safe to show.

    `index` is the number of completion tokens before this delta (prior tokens included), so that a receiver can
    tell a repeat from news. `token_ids` may be empty when only `text`, `prompt_logprobs` or `finish` is news.
    `embedding`: native float32, of length 1; beside the `finish` of whoever asked for one.
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


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A worker is ready and empty: every unfinished request must be submitted to it again.

    device, dtype, attention, kernel_level, matrices, kv_cache_dtype: as in `service.engine_builder.EngineFacts`.
    """

    worker_id: int
    epoch: int
    device: str
    dtype: str
    attention: str
    kernel_level: str | None
    matrices: str
    kv_cache_dtype: str
    num_blocks: int
    block_size: int
    startup_seconds: float


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The answer to a `Look`.

    `weights` are native float32: for each head the lower triangle, row by row; what is above it is 0. None where the
    computation failed.
    """

    uid: str
    weights: bytes | None
    compute_seconds: float


class RunningLimitChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The engine runs at most this many sequences from now on, see `service.engine.running_limit`."""

    max_num_running: int


Event: TypeAlias = TokenDelta | Hello | Looked | Started | RunningLimitChanged


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Plain facts of one engine step, for metrics. Counters are this step's increments; `kv_usage` is 0..1."""

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


def encode_command(command: Command) -> bytes:
    """Bytes for LitServe's request queue."""
    return _ENCODER.encode(command)


def decode_command(data: bytes) -> Command:
    """The command `encode_command` wrote. Raises `msgspec.DecodeError` on anything else."""
    command: Command = _COMMAND_DECODER.decode(data)
    return command


def encode_events(events: list[Event]) -> bytes:
    """Bytes of one step's events for one API process."""
    return _ENCODER.encode(events)


def decode_events(data: bytes) -> list[Event]:
    """The events `encode_events` wrote. Raises `msgspec.DecodeError` on anything else."""
    return _EVENTS_DECODER.decode(data)


_ENCODER = msgspec.msgpack.Encoder()
_COMMAND_DECODER = msgspec.msgpack.Decoder(Command)
_EVENTS_DECODER = msgspec.msgpack.Decoder(list[Event])
