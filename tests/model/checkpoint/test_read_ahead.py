"""Reading of weight files into the page cache."""

import os
from pathlib import Path

import pytest

from model.checkpoint.read_ahead import read_ahead


def test_weights_are_read_ahead_from_regular_files_if_memory_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A named pipe is skipped, because opening it could block forever."""
    paths = [tmp_path / f"model-{number}.safetensors" for number in range(2)]
    for path in (*paths, tmp_path / "manifest.json"):
        path.write_bytes(b"weights")
    os.mkfifo(tmp_path / "pipe.safetensors")
    advised: list[Path] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda descriptor, *_: advised.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    )
    read_ahead(tmp_path)
    read_ahead(tmp_path / "missing")
    assert advised == paths
    monkeypatch.setattr(os, "sysconf", lambda name: 1)  # one byte of memory is free
    read_ahead(tmp_path)
    assert advised == paths
