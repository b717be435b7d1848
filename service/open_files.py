"""How many files and sockets a process may have open, and the connections that leaves room for."""

import logging
import resource
from typing import Final

from service.settings import SettingsError

logger = logging.getLogger(__name__)

# What a process of ours has open beside connections: under 40 at rest, libraries and metrics' files among them.
RESERVED: Final = 64
_FEWEST_CONNECTIONS: Final = 16


def connections_within_limits(wanted: int) -> int:
    """As many of these connections as the limit of open files leaves room for; the limit is raised as far as allowed.

    A process that accepts more than it can hold is told of each again and again, and does little else.

    Raises:
        SettingsError: it leaves no room.
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
            "at most %d connections, not %d: only %d files may be open at once (ulimit -n)", number, wanted, soft
        )
    return number
