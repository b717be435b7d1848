"""Checks of the server before it reads a checkpoint."""

import socket
from pathlib import Path

import pytest

from service.config.settings import ServeSettings
from service.server import build_server
from service.supervisor.supervisor import StartError


def test_port_in_use_is_found_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            build_server(ServeSettings(checkpoint=tmp_path / "none", port=port))
