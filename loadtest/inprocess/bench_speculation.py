"""Benchmark of speculative decoding by prompt lookup: its gain, and its cost where lookup finds nothing.

    python -m loadtest.inprocess.bench_speculation --checkpoint checkpoints/NAME --out docs/results/speculation.json

Two engines in this process, one with drafts and one without, serve the same requests in turn. "Repetitive" prompts
hold a passage twice and its beginning a third time, and are continued greedily. "Sampled" prompts are passages
continued at temperature 1, where the next token is hard to guess. The benchmark also counts the completions with
the same tokens from both engines, which should be all.

As in a server, a stream that ends makes room for the next request. The clock stops when no more requests wait, so
that the slowest request does not dominate. Lengths differ, so that streams do not begin and end together, which
drafts would alter.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.client.workload import TALES_PATH
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.spread import Spread
from model.sampling.params import SamplingParams
from service.config.settings import ServeSettings
from service.engine.engine import Engine
from service.ipc.messages import Submit

_REQUESTS_PER_STREAM = 4
_PASSAGE_WORDS = 60
_BEGUN_WORDS = 12
_SAMPLING = {"repetitive": 0.0, "sampled": 1.0}


def submits(workload: str, opened: InProcess, count: int, num_tokens: int, round_number: int) -> list[Submit]:
    """Return the requests of a round. Each round has its own."""
    words = TALES_PATH.read_text(encoding="utf-8").split()
    made = []
    for number in range(count):
        start = (round_number * count + number) * 37 % (len(words) - _PASSAGE_WORDS)
        passage = " ".join(words[start : start + _PASSAGE_WORDS])
        begun = " ".join(words[start : start + _BEGUN_WORDS])
        prompt = f"{passage}\n{passage}\n{begun}" if workload == "repetitive" else passage
        made.append(
            Submit(
                uid=f"{workload}-{round_number}-{number}",
                attempt=0,
                prompt_token_ids=tuple(opened.token_ids(prompt)),
                prior_token_ids=(),
                params=SamplingParams(
                    max_tokens=num_tokens * (6 + number % 5) // 8,
                    temperature=_SAMPLING[workload],
                    seed=number,
                    ignore_eos=True,
                ),
                arrival_seconds=time.monotonic(),
                deadline_seconds=None,
            )
        )
    return made


def run(
    engine: Engine, requests: Sequence[Submit], num_streams: int
) -> tuple[float, dict[str, list[int]], tuple[int, int]]:
    """Return completion tokens/s while all streams are busy, each request's tokens, and (drafted, accepted) counts.

    `requests` are more than `num_streams`.
    """
    tokens: dict[str, list[int]] = {submit.uid: [] for submit in requests}
    drafted = accepted = 0
    waiting, num_running, rate = list(reversed(requests)), 0, 0.0
    began = time.perf_counter()
    while engine.has_work or waiting:
        while waiting and num_running < num_streams:
            engine.submit(waiting.pop())
            num_running += 1
        if not (waiting or rate):
            rate = sum(map(len, tokens.values())) / (time.perf_counter() - began)
        result = engine.step()
        drafted += result.stats.num_draft_tokens
        accepted += result.stats.num_accepted_tokens
        for event in result.events:
            tokens[event.uid] += event.token_ids
            num_running -= event.finish is not None
    return rate, tokens, (drafted, accepted)


def measure(checkpoint: Path, streams: Sequence[int], *, drafts: int, repeats: int, num_tokens: int) -> dict[str, Any]:
    """Measure every workload at every number of streams, the two engines in turn."""
    plain, drafting = (
        InProcess.open(ServeSettings(checkpoint=checkpoint, speculative_tokens=n, enable_prefix_cache=False))
        for n in (0, drafts)
    )
    levels = []
    for workload in _SAMPLING:
        for num_streams in streams:
            rates: tuple[list[float], list[float]] = ([], [])
            same = total = drafted = accepted = 0
            for number in range(repeats + 1):
                requests = submits(workload, plain, num_streams * _REQUESTS_PER_STREAM, num_tokens, number)
                order = (0, 1) if number % 2 else (1, 0)
                found = {side: run((plain, drafting)[side].engine, requests, num_streams) for side in order}
                if number == 0:
                    continue  # warm-up
                for side in order:
                    rates[side].append(found[side][0])
                same += sum(found[0][1][uid] == ids for uid, ids in found[1][1].items())
                total += len(requests)
                drafted += found[1][2][0]
                accepted += found[1][2][1]
            levels.append(
                {
                    "workload": workload,
                    "streams": num_streams,
                    "tokens_per_second": Spread(tuple(rates[0])).to_dict(),
                    "tokens_per_second_with_drafts": Spread(tuple(rates[1])).to_dict(),
                    "ratio": Spread.of_ratios(rates[1], rates[0]).to_dict(),
                    "draft_tokens": drafted,
                    "accepted_tokens": accepted,
                    "answers": total,
                    "answers_with_the_same_tokens": same,
                }
            )
    return {"kind": "speculation", "model": plain.facts, "max_draft_tokens": drafts, "levels": levels}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 for an unusable checkpoint."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.inprocess.bench_speculation", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON output file (default: standard output)")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="concurrent streams (default: 1 4 16)"
    )
    parser.add_argument(
        "--draft-tokens", type=int, default=8, metavar="N", help="maximum tokens of a draft (default: %(default)s)"
    )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="median tokens of a completion (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(given)
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    try:
        facts |= measure(
            arguments.checkpoint,
            arguments.streams,
            drafts=arguments.draft_tokens,
            repeats=arguments.repeats,
            num_tokens=arguments.output_tokens,
        )
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    tell(facts, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
