"""Driver of Kvasir's engine: `python -m loadtest.peers.drivers.ours_engine --checkpoint DIR [settings]`."""

import itertools
import sys
import time

from loadtest.inprocess.closed_loop import run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.peers.drivers.protocol import Prompts, Wave, serve
from model.sampling.params import SamplingParams
from service.config.settings import ModelSettings, read_settings
from service.ipc.messages import Submit


def main() -> None:
    """Build the engine as the worker does, and serve requests."""
    engine = InProcess.open(read_settings(ModelSettings, sys.argv[1:], command="ours", summary="")).engine
    engine.warm_up()
    numbers = itertools.count()

    def measure(prompts: Prompts, output_tokens: int) -> Wave:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        submits = [
            Submit(
                uid=f"wave-{next(numbers)}",
                attempt=0,
                prompt_token_ids=tuple(prompt),
                prior_token_ids=(),
                params=params,
                arrival_seconds=time.monotonic(),
                deadline_seconds=None,
            )
            for prompt in prompts
        ]
        run = run_closed(engine, submits, num_streams=len(submits))
        first = max(times[0] for times in run.token_seconds)
        return Wave(
            first_seconds=first - run.began_seconds,
            total_seconds=run.ended_seconds - run.began_seconds,
            later_tokens=sum(at > first for times in run.token_seconds for at in times),
            token_ids=list(run.token_ids[0]),
        )

    serve(measure)


if __name__ == "__main__":
    main()
