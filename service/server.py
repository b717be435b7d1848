"""Composition root: creates and connects all long-lived objects of the main process and of the API process."""

import dataclasses
import logging
import os
import pickle
from collections.abc import Sequence
from contextlib import suppress

from model.checkpoint.manifest import Manifest, read_manifest
from model.io.files import CheckpointError
from model.system.c_library import trim_heap
from model.tokenizer.files import LateTokenizer
from service.config.settings import ServeSettings
from service.http.api_keys import read_api_keys
from service.ipc.channel import Channel
from service.ipc.shared_state import Lifecycle, WorkerState
from service.preprocess.served_model import read_adapters, read_served_model
from service.requests.adapters import ServedAdapter, loading_bytes
from service.requests.engine_worker import EngineWorker
from service.supervisor.supervisor import StartError, Supervisor, check_port
from service.supervisor.worker_process import WorkerProcess
from service.supervisor.worker_slot import WorkerSlot
from service.worker.worker import VerifiedCheckpoint, Worker, WorkerOrder, importable_name, stamps_of

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
        SettingsError: --max-context-length is over the model's positions, the API keys cannot be used, or the limit of
            open files is too low.
        StartError: the port is in use, or no process can be started.
    """
    check_port(settings.host, settings.port)
    keys = read_api_keys(settings)
    manifest = read_manifest(settings.checkpoint)
    manifest.check_files(has_hashes=False)
    adapters = tuple(read_adapters(settings, manifest))
    lifecycle, num_workers = Lifecycle(main_pid=os.getpid()), settings.devices
    workers = [EngineWorker(Channel(), WorkerState(), index) for index in range(num_workers)]
    slots = _make_slots(settings, manifest, adapters, workers, importable_name(worker_class))
    standby = _begin(slots[0], worker, has_standby=settings.standby)
    try:
        served = read_served_model(settings, manifest, manifest.verify(), adapters)
        trim_heap()  # frees 63 MB, which the API process would inherit: parsed JSON of a tokenizer of 152,000 tokens
        listed = f"{num_workers} (device, threads and KV-cache: those of worker 0)" if num_workers > 1 else num_workers
        verified = VerifiedCheckpoint(
            tokenizer=LateTokenizer(served.tokenizer, manifest.directory),
            found={**served.setting_values(settings), "api_keys": keys, "devices": listed},
        )
        for slot in slots:
            slot.confirm(pickle.dumps(verified))
        for warning in (*keys.warnings, *served.warnings()):
            logger.warning("%s", warning)
        from service.supervisor.api_process import make_api_server  # 0.4 s, in which the worker loads the model

        api = make_api_server(settings, served, workers, keys, lifecycle)
    except BaseException:
        for process in (slots[0].process, standby):
            if process is not None:
                process.close()
        for each in workers:
            each.channel.close()
        raise
    return Supervisor(
        lifecycle,
        slots=slots,
        start_worker=lambda is_standby: WorkerProcess.start(is_standby=is_standby),
        start_api=api.start,
        settings=settings,
        standby=standby,
    )


def _make_slots(
    settings: ServeSettings,
    manifest: Manifest,
    adapters: Sequence[ServedAdapter],
    workers: Sequence[EngineWorker],
    worker_class: str,
) -> list[WorkerSlot]:
    with suppress(CheckpointError):  # `verify` raises the error
        _ = manifest.placements  # for the workers, which get them with the manifest
    order = WorkerOrder(
        worker_class=worker_class,
        settings=settings,
        manifest=manifest,
        stamps=stamps_of(manifest.weight_files),
        adapter_bytes=loading_bytes({adapter.key: adapter.num_bytes for adapter in adapters}.values()),
        main_pid=os.getpid(),
    )
    return [_slot(dataclasses.replace(order, index=each.index), each) for each in workers]


def _slot(order: WorkerOrder, worker: EngineWorker) -> WorkerSlot:
    content, descriptors = pickle.dumps(order), [worker.state.descriptor, worker.channel.worker_end.fileno()]
    return WorkerSlot(
        worker.state,
        lambda process, has_standby: process.begin(content, descriptors, has_standby=has_standby),
        name=f"worker {worker.index}" if order.settings.devices > 1 else "the worker",
    )


def _begin(slot: WorkerSlot, process: WorkerProcess | None, *, has_standby: bool) -> WorkerProcess | None:
    """Let a process, None: a new one, load the model while main verifies the checkpoint. Return the standby."""
    try:
        return slot.begin(process or WorkerProcess.start(), has_standby=has_standby)
    except OSError as error:
        raise StartError(
            f"the worker process cannot be started, because the operating system refused a resource: {error}"
        ) from error
