"""Loading of LoRA adapters in a background thread, while the engine runs steps."""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import torch

from model.checkpoint.lora_adapter import Adapter
from model.io.files import CheckpointError, first_line
from service.engine.execution.model_runner import ModelRunner
from service.ipc.messages import LoadAdapter, Submit

logger = logging.getLogger(__name__)

# Maximum wait of an idle step for a load: the engine loop must read new commands in between.
_PATIENCE_SECONDS = 0.01
_NICENESS = 5  # a third of the time that a step's thread gets on a busy CPU


class AdapterLoader:
    """Loader of a model runner's adapters, and the submissions that wait for a load.

    One adapter is loaded at a time, as `loading_bytes` assumes. A load that fails is tried again for each submission
    that uses the adapter, since its files may be back.
    """

    def __init__(self, read: Callable[[Path], Adapter], runner: ModelRunner) -> None:
        self._read, self._adapters = read, runner.adapters
        self._directories: dict[str, str] = {}  # by key, until `unload`
        self._loading: dict[str, Future[Callable[[], None] | None]] = {}  # by key
        self._held: dict[str, Submit] = {}  # by uid
        self._thread = ThreadPoolExecutor(1, "adapters", _prepare_thread)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def load(self, command: LoadAdapter) -> None:
        """Begin to load an adapter, unless it is loaded. It stays loaded until `unload`."""
        self._directories[command.key] = command.directory
        self._begin(command.key)

    def unload(self, key: str) -> None:
        """Free an adapter. Call only when no sequence uses it. Unknown keys are ignored."""
        self._directories.pop(key, None)
        self._loading.pop(key, None)
        self._adapters.remove(key)

    def hold(self, submit: Submit) -> bool:
        """Hold a submission until its adapter is loaded, and return True; False if the submission need not wait.

        If an equal or newer attempt of its uid is held already, drop the submission, and return True.
        """
        if submit.adapter not in self._directories or submit.adapter in self._adapters:
            return False
        self._begin(submit.adapter)
        held = self._held.get(submit.uid)
        if held is None or submit.attempt > held.attempt:
            self._held[submit.uid] = submit
        return True

    def forget(self, uid: str) -> None:
        """Drop a held submission. Unknown uids are ignored."""
        self._held.pop(uid, None)

    def take_loaded(self, *, may_wait: bool) -> list[Submit]:
        """Remove and return the held submissions whose load has ended. `may_wait`: wait up to 10 ms for one.

        The adapters that were loaded are then in the model runner.
        """
        if may_wait and self._held:
            wait(self._loading.values(), _PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
        ended = {key: self._loading.pop(key) for key, future in list(self._loading.items()) if future.done()}
        for future in ended.values():
            if (add := future.result()) is not None:
                add()
        return [self._held.pop(uid) for uid, submit in list(self._held.items()) if submit.adapter not in self._loading]

    def _begin(self, key: str) -> None:
        if key not in self._loading and key not in self._adapters:
            self._loading[key] = self._thread.submit(self._load, key, Path(self._directories[key]))

    def _load(self, key: str, directory: Path) -> Callable[[], None] | None:
        """Return the function that adds an adapter to the model runner; None if the adapter cannot be read."""
        try:
            adapter = self._read(directory)
            if adapter.key != key:
                raise CheckpointError(
                    f"{directory}: the adapter's files have changed since the service read them; restore them, or "
                    "unload the adapter and load it again"
                )
            return self._adapters.pack(adapter)
        except Exception as error:  # of a bug or a lack of memory, too: the steps of other requests go on
            logger.error("an adapter could not be loaded, so its requests fail: %s", first_line(error))
            return None


def _prepare_thread() -> None:
    torch.set_num_threads(1)  # of this thread: others would compete with those of the steps
    with suppress(OSError):  # forbidden in some sandboxes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
