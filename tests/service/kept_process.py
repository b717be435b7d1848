"""Child processes that outlive a test, since a start takes longer than most tests of the HTTP interface."""

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from service.sandbox.child_process import BoundedProcess


class KeptProcess(BoundedProcess):
    """`BoundedProcess` whose `close` keeps the child for the next object with the same program and first command.

    A child that does not wait for a command is killed as usual, and so is a template's child after a failure that is
    not the template's own: it may be short of memory.
    """

    _kept: ClassVar[dict[str, list[subprocess.Popen[str]]]] = defaultdict(list)
    # The kernel kills a child when the thread that started it ends. These threads live as long as pytest.
    _threads: ClassVar[ThreadPoolExecutor] = ThreadPoolExecutor(8)
    _is_waiting = False

    def _key(self) -> str:
        return json.dumps([self._program, str(self._limits), self._opening()])

    def _ask_once(self, command: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None and (kept := self._kept[self._key()]):
            self._process = kept.pop()
        return self._threads.submit(super()._ask_once, command).result()

    def _exchange(self, process: subprocess.Popen[str], command: Mapping[str, Any]) -> dict[str, Any]:
        self._is_waiting = False
        reply = super()._exchange(process, command)
        self._is_waiting = reply.get("by_template", True)
        return reply

    def close(self) -> None:
        """Keep the child, or kill it."""
        if self._is_waiting and self._process is not None:
            self._kept[self._key()].append(self._process)
            self._process = None
        else:
            super().close()

    @classmethod
    def end_all(cls) -> None:
        """Kill all kept children."""
        for process in [process for kept in cls._kept.values() for process in kept]:
            process.kill()
            process.communicate()
        cls._kept.clear()
