"""Worker with an engine that computes nothing: every sequence gets one token per step until `max_tokens`.

It runs in a real service, so that everything around the engine can be measured.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from service.config import log_setup
from service.config.settings import ServeSettings, SettingsError, read_settings
from service.ipc.messages import Finish, FinishReason, StepStats, Submit, TokenDelta
from service.server import build_server
from service.supervisor.supervisor import StartError
from service.worker.worker import Worker

_NUM_BLOCKS = 2**16
# Passed by the environment, the only thing that the worker process inherits from the benchmark.
STEP_MS = "KVASIR_BENCH_STEP_MS"


class InstantEngine:
    """Engine with the interface that `service.worker.engine_loop.EngineLoop` uses.

    Args:
        step_seconds: least time between the starts of two steps.
    """

    max_num_running = 1024

    def __init__(self, token_id: int, *, step_seconds: float) -> None:
        self._token_id = token_id
        self._step_seconds = step_seconds
        self._next_step_seconds = 0.0
        self._live: dict[str, tuple[Submit, int]] = {}  # sequence and number of its tokens, by uid
        self._admitted: list[tuple[str, int]] = []  # uid and attempt of the sequences since the last step

    @property
    def has_work(self) -> bool:
        """True if a sequence is unfinished."""
        return bool(self._live)

    def submit(self, submit: Submit) -> None:
        """Add a sequence of at least one token."""
        self._live[submit.uid] = (submit, len(submit.prior_token_ids))
        self._admitted.append((submit.uid, submit.attempt))

    def cancel(self, uid: str) -> None:
        """Remove a sequence."""
        self._live.pop(uid, None)

    def step(self, *, before: Callable[[list[tuple[str, int]]], None] | None = None) -> SimpleNamespace:
        """Return a token for every sequence. `before` is called with the uid and attempt of new sequences."""
        if before is not None and self._admitted:
            before(self._admitted)
        self._admitted = []
        time.sleep(max(0.0, self._next_step_seconds - time.monotonic()))
        self._next_step_seconds = time.monotonic() + self._step_seconds
        events = [self._next_token(submit, done) for submit, done in list(self._live.values())]
        stats = dict.fromkeys(StepStats.__struct_fields__, 0) | {
            "num_running": len(self._live),
            "max_num_running": self.max_num_running,
            "num_blocks": _NUM_BLOCKS,
            "num_free_blocks": _NUM_BLOCKS,
            "batch_size": len(events),
            "num_completion_tokens": len(events),
        }
        return SimpleNamespace(events=events, stats=StepStats(**stats))

    def _next_token(self, submit: Submit, done: int) -> TokenDelta:
        finish = None
        self._live[submit.uid] = (submit, done + 1)
        if done + 1 >= submit.params.max_tokens:
            del self._live[submit.uid]
            fields: dict[str, Any] = dict.fromkeys(Finish.__struct_fields__, 0)
            fields |= {"reason": FinishReason.LENGTH, "stop_reason": None, "error": None}
            fields |= {"num_prompt_tokens": len(submit.prompt_token_ids), "num_completion_tokens": done + 1}
            finish = Finish(**fields)
        return TokenDelta(
            uid=submit.uid,
            attempt=submit.attempt,
            index=done,
            token_ids=(self._token_id,),
            text=" the",
            logprobs=None,
            prompt_logprobs=None,
            finish=finish,
        )


class InstantAPI(Worker):
    """API that builds the instant engine in place of the service's engine."""

    def build(self) -> Any:
        """Build the engine, see `Worker.build`."""
        from service.worker.engine_factory import EngineFacts  # imports torch, which the API process must not hold

        facts = EngineFacts(
            device="none",
            attention="none",
            dtype="none",
            matrices="none",
            kv_cache_dtype="none",
            kernel_level=None,
            reasons={},
            threads=1,
            max_context_length=self.manifest.config.max_context_length,
            num_blocks=_NUM_BLOCKS,
            block_size=16,
            kv_cache_bytes=0,
        )
        return InstantEngine(token_id=0, step_seconds=float(os.environ.get(STEP_MS, "0")) / 1000.0), facts


def serve_instantly(argv: Sequence[str]) -> int:
    """Run `kvasir serve` with this engine until a signal. Return the exit code."""
    try:
        settings = read_settings(ServeSettings, argv, command="serve", summary="")
        log_setup.configure(settings.log_level)
        return build_server(settings, worker_class=InstantAPI).run()
    except (SettingsError, StartError) as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
