"""Health check of a container: exit code 0 if the service in it answers `GET /ready` with 200.

    python -m service.healthcheck

The address comes from KVASIR_HOST and KVASIR_PORT, as it does for `kvasir serve`. The check runs every few seconds, so
it imports only `socket`: `http.client` takes another 50 ms of CPU.
"""

import os
import socket
import sys
from collections.abc import Mapping

# The defaults of `service.settings`, which is too slow to import here.
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", "8000"
# Addresses that only a listening socket can have, and where that socket is reached.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Under the HEALTHCHECK's own limit of 5 s, so that the check reports the timeout itself.
TIMEOUT_SECONDS = 4.0
_STATUS_LINE_BYTES = 1024


def main(environment: Mapping[str, str]) -> int:
    """Check once; print the reason if the service is not ready."""
    host = environment.get("KVASIR_HOST", DEFAULT_HOST)
    host, port = _LOOPBACK.get(host, host), environment.get("KVASIR_PORT", DEFAULT_PORT)
    try:
        status = _status(host, int(port), environment.get("KVASIR_API_KEY"))
    except (OSError, ValueError) as error:
        print(f"{host} port {port}: {error}")
        return 1
    if status == 401:
        print("GET /ready: 401; --no-open-probes needs the environment variable KVASIR_API_KEY for this check, too")
    elif status != 200:
        print(f"GET /ready: {status}")
    return int(status != 200)


def _status(host: str, port: int, api_key: str | None) -> int:
    """HTTP status of `GET /ready`.

    Raises:
        OSError: no connection, or no answer within `TIMEOUT_SECONDS`.
        ValueError: the answer is not HTTP.
    """
    lines = ["GET /ready HTTP/1.1", "Host: localhost", "Connection: close"]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key.strip()}")
    with socket.create_connection((host, port), timeout=TIMEOUT_SECONDS) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        with connection.makefile("rb") as answer:
            words = answer.readline(_STATUS_LINE_BYTES).split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("the answer is not HTTP")
    return int(words[1])


if __name__ == "__main__":
    sys.exit(main(os.environ))
