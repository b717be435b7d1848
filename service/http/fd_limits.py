"""Limit of open files (RLIMIT_NOFILE), and the number of connections that it allows."""

import logging
import resource
from typing import Final

from service.config.settings import SettingsError

logger = logging.getLogger(__name__)

# Open files that are not connections: an idle process has fewer than 40, including libraries.
RESERVED: Final = 64
_FEWEST_CONNECTIONS: Final = 16


def limit_connections(wanted: int) -> int:
    """Return `wanted`, or fewer connections if the limit of open files is too low. Raises the soft limit if allowed.

    A process at its limit of open files is woken for each pending connection again and again, and does little else.

    Raises:
        SettingsError: the limit of open files is too low for any connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED
    if soft < needed and soft != resource.RLIM_INFINITY:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    number = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - RESERVED)
    if number < min(wanted, _FEWEST_CONNECTIONS):
        raise SettingsError(
            f"only {soft} files may be open at once, which leaves no room for connections; "
            f"raise the limit (ulimit -n) to {needed}"
        )
    if number < wanted:
        logger.warning(
            "at most %d connections, not %d: only %d files may be open at once; raise ulimit -n", number, wanted, soft
        )
    return number
