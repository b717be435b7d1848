"""Driver of Kvasir's engine: `python -m loadtest.peers.drivers.ours_engine --checkpoint DIR [settings]`."""

import sys

from loadtest.inprocess.engine import InProcess
from loadtest.peers.drivers.protocol import Prompts, Wave, serve
from service.config.settings import ModelSettings, read_settings


def main() -> None:
    """Build the engine as the worker process does, then serve the requests on standard input."""
    served = InProcess.open(read_settings(ModelSettings, sys.argv[1:], command="ours", summary=""))
    served.engine.warm_up()

    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        run = served.complete(prompts, output_tokens)
        first = max(times[0] for times in run.token_seconds)
        later = sum(at > first for times in run.token_seconds for at in times)
        began = run.began_seconds
        return Wave(first - began, run.ended_seconds - began, later)

    serve(measure)


if __name__ == "__main__":
    main()
