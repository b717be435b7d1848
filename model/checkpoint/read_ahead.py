"""Reading of weight files into the page cache, ahead of the process that loads them."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from model.gguf.container import is_gguf


def read_ahead(checkpoint: Path) -> None:
    """Start reading a checkpoint's weights into the page cache, unless twice their size exceeds the free memory.

    checkpoint: directory with safetensors files, or GGUF file. Files that cannot be read are not reported.
    """
    with suppress(OSError, ValueError):  # the loader reports errors
        found = [checkpoint] if is_gguf(checkpoint) else sorted(checkpoint.glob("*.safetensors"))
        paths = [path for path in found if stat.S_ISREG(path.stat().st_mode)]
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 2 * sum(path.stat().st_size for path in paths) > room:
            return
        for path in paths:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
