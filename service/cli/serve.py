"""Command `kvasir serve`."""

import gc
import multiprocessing
import sys

from service.config import log_setup
from service.config.settings import ServeSettings
from service.server import build_server
from service.supervisor.supervisor import StartError
from service.supervisor.worker_process import WorkerProcess


def main(settings: ServeSettings, worker: WorkerProcess | None = None) -> int:
    """Run `kvasir serve` until a signal or failure, with `worker` as the first worker process. Return the exit code."""
    multiprocessing.current_process().name = "kvasir-main"  # for log lines
    log_setup.configure(settings.log_level, settings.log_format)
    gc.disable()  # while the API's modules are imported
    try:
        supervisor = build_server(settings, worker=worker)
        gc.freeze()
        gc.enable()
        return supervisor.run()
    except StartError as error:
        if str(error):
            print(f"kvasir serve: {error}", file=sys.stderr)
        return error.exit_code
