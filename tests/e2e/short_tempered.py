"""`kvasir serve` that gives up at the second death of a worker: `python -m tests.e2e.short_tempered serve …`.

Six deaths take six starts, and where a start takes ten seconds they are not within a minute.
"""

import sys

from service.cli.main import main
from service.supervisor import supervisor

if __name__ == "__main__":
    supervisor._MAX_WORKER_DEATHS_A_MINUTE = 1
    raise SystemExit(main(sys.argv[1:]))
