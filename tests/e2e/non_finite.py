"""`kvasir serve` with a model that computes NaN for one token: `python -m tests.e2e.non_finite serve …`."""

import math
import sys
from typing import Any

import torch

from service.config import log_setup
from service.config.settings import ServeSettings, read_settings
from service.server import build_server
from service.worker.worker import Worker

POISON = 1


class DamagedAPI(Worker):
    """Worker that sets one embedding row to NaN after the checkpoint has been checked and loaded."""

    def build(self) -> Any:
        """See `Worker.build`."""
        engine, facts = super().build()
        engine.warm_up(1)
        with torch.inference_mode():
            runner: Any = engine._runner
            runner._model.token_embedding.weight[POISON] = math.nan
        return engine, facts


if __name__ == "__main__":
    settings = read_settings(ServeSettings, sys.argv[2:], command="serve", summary="")
    log_setup.configure(settings.log_level, settings.log_format)
    raise SystemExit(build_server(settings, worker_class=DamagedAPI).run())
