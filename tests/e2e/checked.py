"""`kvasir serve` that checks the engine's invariants when no work is left: `python -m tests.e2e.checked serve …`.

A violation ends the worker with a traceback. `kvasir serve` does not run these checks, which walk every block.
"""

import sys
from typing import Any

from service.config import log_setup
from service.config.settings import ServeSettings, read_settings
from service.server import build_server
from service.worker.worker import Worker


class CheckedEngine:
    """Engine that checks its invariants after each step that leaves no work."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, **options: Any) -> Any:
        """Compute a step, and check the invariants when no work is left."""
        result = self._engine.step(**options)
        if not self._engine.has_work:
            self._engine.check_integrity()
        return result


class CheckedAPI(Worker):
    """Worker that runs a `CheckedEngine`."""

    def build(self) -> Any:
        """See `Worker.build`."""
        engine, facts = super().build()
        return CheckedEngine(engine), facts


if __name__ == "__main__":
    settings = read_settings(ServeSettings, sys.argv[2:], command="serve", summary="")
    log_setup.configure(settings.log_level, settings.log_format)
    raise SystemExit(build_server(settings, worker_class=CheckedAPI).run())
