"""A worker as LitServe launches one, but in a process that has begun already: see `service.early_worker`."""

import io
import os
import threading
from multiprocessing import resource_tracker, spawn, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import dump
from typing import Any

from litserve import LitAPI
from litserve.callbacks.base import CallbackRunner
from litserve.loops import inference_worker
from litserve.transport.base import MessageTransport
from litserve.utils import WorkerSetupStatus

from service.early_worker import EARLY_WORKER, RECEIVED, Begun


class EarlyProcess(SpawnProcess):
    """A process of multiprocessing's: the one that has begun, where there is one, else a new one."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        begun = EARLY_WORKER.take()
        return SpawnPopen(process_obj) if begun is None else _HandedOver(process_obj, begun)


class _Descriptor:
    """A pickled file descriptor: in the process, one of those that it was handed."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """What it is there."""
        return RECEIVED[self._number]


class _HandedOver(SpawnPopen):
    """What multiprocessing's `Popen` of a spawned process is to it, of one that was started before.

    Its end of the socket is the sentinel: it can be read when the process has ended.
    """

    DupFd = _Descriptor  # type: ignore[assignment]  # which is alike

    def __init__(self, process_obj: BaseProcess, begun: Begun) -> None:
        self._begun = begun
        self._polling = threading.Lock()
        self._descriptors: list[int] = []
        super().__init__(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """As any. One thread keeps the worker and another ends it: who is told last by the kernel is told nothing."""
        with self._polling:
            code: int | None = super().poll(flag)
            return code

    def duplicate_for_child(self, fd: int) -> int:
        """The number of a descriptor among those that are handed over."""
        self._descriptors.append(fd)
        return len(self._descriptors) - 1

    def _launch(self, process_obj: BaseProcess) -> None:
        order = io.BytesIO()
        set_spawning_popen(self)
        try:
            dump(spawn.get_preparation_data(process_obj.name), order)
            dump(process_obj, order)
        finally:
            set_spawning_popen(None)
        self.pid, self.sentinel = self._begun.pid, self._begun.channel.fileno()
        self.finalizer = util.Finalize(self, self._begun.channel.close)
        tracker = resource_tracker.getfd()
        assert tracker is not None, "getfd has started it"
        self._begun.hand_over([tracker, *self._descriptors], order.getvalue())


def launch_worker(
    api: LitAPI, queue: Any, transport: MessageTransport, statuses: Any, callbacks: CallbackRunner
) -> BaseProcess:
    """Start one: LitServe's `launch_single_inference_worker`, but for what concerns routes.

    Args:
        statuses: LitServe's of its workers, shared with them.
    """
    statuses[f"{api.api_path.split('/')[-1]}_0"] = WorkerSetupStatus.STARTING
    order = (api, "cpu", 0, queue, transport, statuses, callbacks, True)
    process = EarlyProcess(target=inference_worker, args=order, name="inference-worker")
    process.start()
    return process
