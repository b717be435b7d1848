"""Record which functions of Kvasir receive a prompt's token ids or a sampled token, in all processes of a server.

Python imports this module at the start of each process that has its folder in PYTHONPATH. `PATH_PROBE` holds the
settings as JSON: `out` (file of the record), `root` (repository), `prompt` (token ids), `token` and `text` (the sampled
token). Each line of the record has the direction (`in` or `out`), process id, thread, function and representation.
Lines are in order of time, over all processes, and each line occurs once.
"""

import array
import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import msgspec

# Objects are searched to this depth: request, choices, choice, message, ids.
_DEPTH = 5
_MAX_MEMBERS = 16
_VARARGS, _VARKEYWORDS = 4, 8


class PathProbe:
    """Profile function that records calls with the prompt's ids or the sampled token among their arguments."""

    def __init__(self, out: str, root: str, prompt: list[int], token: int, text: str) -> None:
        self._file = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._prefixes = (f"{root}/service/", f"{root}/model/")
        self._root = root
        self._prompt, self._token, self._text = prompt, token, text
        # 32 and 64 bit integers, and MessagePack after the header of the list.
        self._encodings = [array.array("i", prompt).tobytes(), array.array("q", prompt).tobytes()]
        self._encodings.append(msgspec.msgpack.encode(prompt)[-2 * len(prompt) :])
        self._names: dict[CodeType, str] = {}
        self._written: set[str] = set()
        self._busy = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record one call. The interpreter calls this for each call and return in each thread."""
        if event != "call" or getattr(self._busy, "flag", False):
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            is_ours = code.co_filename.startswith(self._prefixes) and "<" not in code.co_name
            name = f"{code.co_filename[len(self._root) + 1 :]}:{code.co_qualname}" if is_ours else ""
            self._names[code] = name
        if not name:
            return
        self._busy.flag = True
        try:
            flags = bool(code.co_flags & _VARARGS) + bool(code.co_flags & _VARKEYWORDS)
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
            for argument in names:
                if argument not in ("self", "cls") and argument in frame.f_locals:
                    value = frame.f_locals[argument]
                    self._record("in", name, self._find(value, self._prompt_kind, _DEPTH))
                    self._record("out", name, self._find(value, self._token_kind, _DEPTH))
        finally:
            self._busy.flag = False

    def _record(self, direction: str, name: str, kind: str | None) -> None:
        thread = threading.current_thread().name.replace(" ", "-")
        line = f"{direction} {os.getpid()} {thread} {name} {kind}\n"
        if kind is not None and line not in self._written:
            self._written.add(line)
            os.write(self._file, line.encode())

    def _find(self, value: Any, kind_of: Any, depth: int) -> str | None:
        """Return the name of the type in which `kind_of` finds the prompt or token within a value; None if absent."""
        kind: str | None = kind_of(value)
        if kind is not None or depth == 0:
            return kind
        if isinstance(value, dict):
            members: list[Any] = list(value.values())[-_MAX_MEMBERS:]
        elif isinstance(value, list | tuple):
            members = list(value[-_MAX_MEMBERS:])
        elif type(value).__module__.split(".")[0] in ("service", "model"):
            fields = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
            if fields is None and type(value).__name__ == "SequenceState":
                fields = vars(value)
            members = [getattr(value, field, None) for field in fields or ()]
        else:
            return None
        found = (self._find(member, kind_of, depth - 1) for member in members)
        kind = next((kind for kind in found if kind is not None), None)
        return type(value).__name__ if kind in ("list", "tuple", "int", "str") and not isinstance(value, list) else kind

    def _prompt_kind(self, value: Any) -> str | None:
        name = type(value).__name__
        if isinstance(value, list | tuple):
            is_found = list(value[: len(self._prompt)]) == self._prompt
        elif isinstance(value, bytes | bytearray | memoryview):
            is_found = any(encoding in bytes(value) for encoding in self._encodings)
        elif name in ("Tensor", "ndarray"):
            is_found = "int" in str(value.dtype) and value.reshape(-1).tolist()[: len(self._prompt)] == self._prompt
        else:
            is_found = False
        return name if is_found else None

    def _token_kind(self, value: Any) -> str | None:
        name = type(value).__name__
        if type(value) is int:
            is_found = value == self._token
        elif isinstance(value, str):
            is_found = self._text in value
        elif isinstance(value, bytes | bytearray | memoryview):
            is_found = self._text.encode() in bytes(value)
        elif name == "Tensor":
            is_found = "int" in str(value.dtype) and value.numel() == 1 and value.item() == self._token
        else:
            is_found = False
        return name if is_found else None


if "PATH_PROBE" in os.environ:
    probe = PathProbe(**json.loads(os.environ["PATH_PROBE"]))
    threading.setprofile(probe)
    sys.setprofile(probe)
