"""Health check of a container, `python -m service.cli.healthcheck`: exit code 0 if `GET /ready` returns 200."""

import os
import socket  # every few seconds, `http.client` would take another 50 ms of CPU
import sys
from collections.abc import Mapping

# Copies of the defaults in `service.config.settings`, because that module is slow to import.
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", "8000"
# Wildcard addresses for listening, and the loopback address at which each is reached.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Below the 5 s timeout of the Dockerfile's HEALTHCHECK, so that the check itself reports the timeout.
TIMEOUT_SECONDS = 4.0
_STATUS_LINE_BYTES = 1024


def main(environment: Mapping[str, str]) -> int:
    """Request `GET /ready` at KVASIR_HOST and KVASIR_PORT. Return 0 if ready; else print the reason, and return 1."""
    host = environment.get("KVASIR_HOST", DEFAULT_HOST)
    host, port = _LOOPBACK.get(host, host), environment.get("KVASIR_PORT", DEFAULT_PORT)
    lines = ["GET /ready HTTP/1.1", "Host: localhost", "Connection: close"]
    if (api_key := environment.get("KVASIR_API_KEY")) is not None:
        lines.append(f"Authorization: Bearer {api_key.strip()}")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            with connection.makefile("rb") as response:
                words = response.readline(_STATUS_LINE_BYTES).split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/"):
            raise ValueError("the response to GET /ready is not HTTP; check KVASIR_PORT")
        status = int(words[1])
    except (OSError, ValueError) as error:
        print(f"GET /ready at {host} port {port} failed: {error}")
        return 1
    if status == 401:
        print("GET /ready: status 401; with --no-open-probes, set KVASIR_API_KEY in the health check's environment")
    elif status != 200:
        print(f"GET /ready: status {status}, the service is not ready")
    return int(status != 200)


if __name__ == "__main__":
    sys.exit(main(os.environ))
