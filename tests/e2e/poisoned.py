"""`kvasir serve` whose worker dies at the prompt `KILLS`: `python -m tests.e2e.poisoned serve …`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from service.config import log_setup
from service.config.settings import ServeSettings, read_settings
from service.ipc.messages import Submit
from service.server import build_server
from service.worker.worker import Worker

KILLS = [1, 2, 1, 2]


class PoisonedEngine:
    """Engine that kills its process before the first step of a sequence with the prompt `KILLS`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._poisons: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, submit: Submit) -> None:
        """Store the prompt of the sequence, and submit the sequence to the engine."""
        self._poisons[submit.uid] = list(submit.prompt_token_ids)
        self._engine.submit(submit)

    def step(self, *, before: Callable[[list[tuple[str, int]]], None]) -> Any:
        """Compute a step, or kill the process if a new sequence has the prompt `KILLS`."""

        def begin(admitted: list[tuple[str, int]]) -> None:
            before(admitted)
            if KILLS in (self._poisons[uid] for uid, _ in admitted):
                os.kill(os.getpid(), signal.SIGKILL)

        return self._engine.step(before=begin)


class PoisonedAPI(Worker):
    """Worker that runs a `PoisonedEngine`."""

    def build(self) -> Any:
        """See `Worker.build`."""
        engine, facts = super().build()
        return PoisonedEngine(engine), facts


if __name__ == "__main__":
    settings = read_settings(ServeSettings, sys.argv[2:], command="serve", summary="")
    log_setup.configure(settings.log_level, settings.log_format)
    raise SystemExit(build_server(settings, worker_class=PoisonedAPI).run())
