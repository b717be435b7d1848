"""Constructors of commands and events, with default values for the fields that a test does not set."""

from typing import Any

from model.sampling.params import SamplingParams
from service.ipc.messages import Finish, FinishReason, StepStats, Submit, TokenDelta, WorkerReady
from service.requests.inflight import Choice, InflightRequest


def make_submit(uid: str = "a", *, prompt: tuple[int, ...] = (1, 2, 3), **params: Any) -> Submit:
    return Submit(
        uid=uid, prompt_token_ids=prompt, params=SamplingParams(**{"max_tokens": 10, **params}), arrival_seconds=0.0
    )


def make_choice(uid: str = "a", *, index: int = 0, prompt_index: int = 0, text: str = "", **submit: Any) -> Choice:
    return Choice(index=index, prompt_index=prompt_index, prompt_text=text, submit=make_submit(uid, **submit))


def make_request(*choices: Choice) -> InflightRequest:
    return InflightRequest(choices=list(choices), arrival_seconds=0.0)


def make_finish(reason: FinishReason = FinishReason.LENGTH, **facts: Any) -> Finish:
    defaults: dict[str, Any] = {
        "stop_reason": None,
        "error": None,
        "num_prompt_tokens": 3,
        "num_completion_tokens": 1,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "queue_seconds": 0.001,
        "prefill_seconds": 0.002,
        "decode_seconds": 0.5,
    }
    return Finish(reason=reason, **{**defaults, **facts})


def make_delta(uid: str = "a", *, index: int = 0, ids: tuple[int, ...] = (), text: str = "", **more: Any) -> TokenDelta:
    defaults: dict[str, Any] = {"attempt": 0, "logprobs": None, "prompt_logprobs": None, "finish": None}
    return TokenDelta(uid=uid, index=index, token_ids=ids, text=text, **{**defaults, **more})


def make_hello(epoch: int) -> WorkerReady:
    return WorkerReady(
        epoch=epoch,
        device="cpu",
        dtype="float32",
        attention="native",
        kernel_level="avx2",
        kv_cache_dtype="float32",
        num_blocks=8,
        block_size=4,
        startup_seconds=1.0,
    )


def make_stats(**facts: Any) -> StepStats:
    defaults: dict[str, Any] = dict.fromkeys(StepStats.__struct_fields__, 0)
    return StepStats(**{**defaults, "max_num_running": 4096, "kv_usage": 0.0, "step_seconds": 0.0, **facts})
