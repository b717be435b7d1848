"""`kvasir serve` whose attention queries wait for a file: `python -m tests.e2e.slow_looks serve …`.

The environment variable `SLOW_LOOKS_UNTIL` is the path of the file. Completions do not wait.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from service.config import log_setup
from service.config.settings import ServeSettings, read_settings
from service.server import build_server
from service.worker.worker import Worker

VARIABLE = "SLOW_LOOKS_UNTIL"


class SlowQueryEngine:
    """Engine whose attention queries last until a file exists."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def attention_weights(self, token_ids: tuple[int, ...], *, layer: int, heads: tuple[int, ...]) -> bytes:
        """Compute an attention query once the file exists. The file `….began` holds the process id of the worker."""
        until = Path(os.environ[VARIABLE])
        until.with_suffix(".began").write_text(str(os.getpid()))
        while not until.exists():
            time.sleep(0.01)
        weights: bytes = self._engine.attention_weights(token_ids, layer=layer, heads=heads)
        return weights


class SlowQueryWorker(Worker):
    """Worker whose attention queries wait for the file."""

    def build(self) -> Any:
        """See `Worker.build`."""
        engine, facts = super().build()
        return SlowQueryEngine(engine), facts


if __name__ == "__main__":
    settings = read_settings(ServeSettings, sys.argv[2:], command="serve", summary="")
    log_setup.configure(settings.log_level, settings.log_format)
    raise SystemExit(build_server(settings, worker_class=SlowQueryWorker).run())
