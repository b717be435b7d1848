"""An engine that computes nothing: every sequence gets one token a step, at once or at a set pace, until `max_tokens`.

It stands in the worker of a real service, so that all around it can be measured.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from service import logs
from service.messages import Finish, FinishReason, StepStats, Submit, TokenDelta
from service.server import StartError, build_server
from service.settings import ServeSettings, SettingsError, read_settings
from service.worker import EngineAPI

_BLOCK_SIZE = 16
_NUM_BLOCKS = 2**16
_TEXT = " the"
# The worker is a process that gets nothing of ours but its environment.
STEP_MS = "KVASIR_BENCH_STEP_MS"


class InstantEngine:
    """What `service.worker.Driver` asks of an engine.

    Args:
        step_seconds: how far apart steps begin, at least.
    """

    max_num_running = 1024

    def __init__(self, token_id: int, *, step_seconds: float) -> None:
        self._token_id = token_id
        self._step_seconds = step_seconds
        self._next_step_seconds = 0.0
        self._live: dict[str, tuple[Submit, int]] = {}  # and the tokens it has

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished."""
        return bool(self._live)

    def submit(self, submit: Submit) -> None:
        """Take on a sequence of at least one token."""
        self._live[submit.uid] = (submit, len(submit.prior_token_ids))

    def cancel(self, uid: str) -> None:
        """Forget a sequence."""
        self._live.pop(uid, None)

    def step(self, *, before: Callable[[list[str]], None] | None = None) -> "InstantResult":
        """A token for everybody. `before` is told who that is."""
        if before is not None:
            before(list(self._live))
        time.sleep(max(0.0, self._next_step_seconds - time.monotonic()))
        self._next_step_seconds = time.monotonic() + self._step_seconds
        events = [self._next(submit, done) for submit, done in list(self._live.values())]
        return InstantResult(events, len(self._live))

    def _next(self, submit: Submit, done: int) -> TokenDelta:
        ends = done + 1 >= submit.params.max_tokens
        if ends:
            del self._live[submit.uid]
        else:
            self._live[submit.uid] = (submit, done + 1)
        return TokenDelta(
            uid=submit.uid,
            attempt=submit.attempt,
            index=done,
            token_ids=(self._token_id,),
            text=_TEXT,
            logprobs=None,
            prompt_logprobs=None,
            finish=_finish(submit, done + 1) if ends else None,
        )


class InstantResult:
    """What a step has for those who wait, and for the metrics."""

    def __init__(self, events: list[TokenDelta], num_running: int) -> None:
        self.events = events
        self.stats = StepStats(
            num_running=num_running,
            max_num_running=InstantEngine.max_num_running,
            num_waiting=0,
            num_blocks=_NUM_BLOCKS,
            num_free_blocks=_NUM_BLOCKS,
            kv_usage=0.0,
            batch_size=len(events),
            num_prompt_tokens=0,
            num_completion_tokens=len(events),
            num_cached_prompt_tokens=0,
            num_prefix_queries=0,
            num_prefix_hits=0,
            num_preemptions=0,
            num_drafts=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            step_seconds=0.0,
        )


class InstantAPI(EngineAPI):
    """Builds it where the service would build its engine."""

    def build(self) -> Any:
        """See `EngineAPI.build`."""
        from service.engine_builder import EngineFacts  # imports torch, which the API process must not hold

        facts = EngineFacts(
            device="none",
            attention="none",
            kernel_level=None,
            reasons={},
            dtype="none",
            matrices="none",
            threads=1,
            max_context_length=self.manifest.config.max_context_length,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            kv_cache_bytes=0,
            kv_cache_dtype="none",
        )
        return InstantEngine(token_id=0, step_seconds=float(os.environ.get(STEP_MS, "0")) / 1000.0), facts


def serve_instantly(argv: Sequence[str]) -> int:
    """`kvasir serve` with this engine, until a signal. Returns the exit code."""
    try:
        settings = read_settings(ServeSettings, argv, command="serve", summary="")
        logs.configure(settings.log_level)
        return build_server(settings, engine_api=InstantAPI).serve()
    except (SettingsError, StartError) as error:
        logging.getLogger(__name__).error("%s", error)
        return 1


def _finish(submit: Submit, num_tokens: int) -> Finish:
    return Finish(
        reason=FinishReason.LENGTH,
        stop_reason=None,
        error=None,
        num_prompt_tokens=len(submit.prompt_token_ids),
        num_completion_tokens=num_tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        queue_seconds=0.0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )
