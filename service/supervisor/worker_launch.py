"""Launch of LitServe workers in a prespawned process; see `service.supervisor.prespawned_worker`."""

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

from service.supervisor.prespawned_worker import EARLY_WORKER, RECEIVED, Begun


class EarlyProcess(SpawnProcess):
    """multiprocessing process that uses the prespawned process if there is one, else spawns a new process."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        begun = EARLY_WORKER.take()
        return SpawnPopen(process_obj) if begun is None else _HandedOver(process_obj, begun)


class _Descriptor:
    """Pickled file descriptor: an index into the descriptors that the process receives (`RECEIVED`)."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """Return the descriptor's number in the receiving process."""
        return RECEIVED[self._number]


class _HandedOver(SpawnPopen):
    """multiprocessing `Popen` of a process that is already running.

    The socket to the process is the sentinel: the socket becomes readable when the process ends.
    """

    DupFd = _Descriptor  # type: ignore[assignment]  # same interface

    def __init__(self, process_obj: BaseProcess, begun: Begun) -> None:
        self._begun = begun
        self._polling = threading.Lock()
        self._descriptors: list[int] = []
        super().__init__(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, None while running.

        Two threads poll, and only the first waitpid() returns the exit status, hence the lock.
        """
        with self._polling:
            code: int | None = super().poll(flag)
            return code

    def duplicate_for_child(self, fd: int) -> int:
        """Add a descriptor to those that are passed to the process; return its index."""
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
        assert tracker is not None, "resource_tracker.getfd() starts the tracker"
        self._begun.hand_over([tracker, *self._descriptors], order.getvalue())


def launch_worker(api: LitAPI, transport: MessageTransport, callbacks: CallbackRunner) -> BaseProcess:
    """Start a worker. Does the same as LitServe's `launch_single_inference_worker`, without queue and state table."""
    no_states: dict[str, str] = {}
    order = (api, "cpu", 0, None, transport, no_states, callbacks, True)
    process = EarlyProcess(target=inference_worker, args=order, name="inference-worker")
    process.start()
    return process
