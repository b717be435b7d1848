"""Composition root: creates and connects all long-lived objects of the main process and of the API process."""

import logging
import os
import pickle

from model.checkpoint.manifest import read_manifest
from service.api.app import Frontend
from service.config.settings import ServeSettings
from service.http.api_keys import read_api_keys
from service.ipc.channel import Channel
from service.ipc.shared_state import Lifecycle
from service.metrics.recorder import Metrics
from service.preprocess.served_model import read_served_model
from service.supervisor.api_process import ApiServer
from service.supervisor.supervisor import StartError, Supervisor, check_port
from service.supervisor.worker_process import WorkerProcess
from service.worker.worker import Worker, WorkerOrder, importable_name, stamps_of

logger = logging.getLogger(__name__)


def build_server(
    settings: ServeSettings, *, worker: WorkerProcess | None = None, worker_class: type[Worker] = Worker
) -> Supervisor:
    """Build all parts of the service and return its supervisor, whose `run` serves.

    Args:
        worker: first worker process, if the command line has already started it; None: start one.
        worker_class: class that builds the engine in the worker process.

    Raises:
        CheckpointError: the checkpoint cannot be used. The message is one line.
        SettingsError: --max-context-length is over the model's positions, the API keys cannot be used, or the limit
            of open files is too low.
        StartError: the port is in use, or no process can be started.
    """
    check_port(settings.host, settings.port)
    keys = read_api_keys(settings)
    manifest = read_manifest(settings.checkpoint)
    served = read_served_model(settings, manifest, manifest.verify())
    for warning in (*keys.warnings, *served.warnings()):
        logger.warning("%s", warning)
    lifecycle, channel = Lifecycle(main_pid=os.getpid()), Channel()
    frontend = Frontend(
        settings, served=served, channel=channel, lifecycle=lifecycle, metrics=Metrics(served.model_name)
    )
    api = ApiServer(settings, frontend=frontend, channel=channel, keys=keys, lifecycle=lifecycle)
    order = pickle.dumps(
        WorkerOrder(
            worker_class=importable_name(worker_class),
            settings=settings,
            manifest=manifest,
            stamps=stamps_of(manifest.weight_files),
            found={**served.found(settings), "api_keys": keys},
            main_pid=lifecycle.main_pid,
        )
    )
    return Supervisor(
        lifecycle,
        worker=worker or _start_worker(settings),
        start_worker=lambda is_standby: WorkerProcess(None if is_standby else settings.checkpoint),
        begin=lambda process: process.begin(order, [lifecycle.descriptor, channel.worker_end.fileno()]),
        start_api=api.start,
        settings=settings,
    )


def _start_worker(settings: ServeSettings) -> WorkerProcess:
    try:
        return WorkerProcess(settings.checkpoint)
    except OSError as error:
        raise StartError(f"the worker process cannot be started: {error}") from error
