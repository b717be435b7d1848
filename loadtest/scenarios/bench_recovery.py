"""Benchmark of the pause of streams after the worker is killed: SIGKILL to next token, with and without standby.

python -m loadtest.scenarios.bench_recovery --checkpoint checkpoints/kvasir-9m --out docs/results/recovery.json
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from loadtest.client.workload import CompletionRequest
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.spread import Spread
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess

_FIRST_REQUEST = CompletionRequest(index=0, prompt="Once upon a time", max_tokens=8, temperature=0.0)
# Wait for processes that start after the service is ready, such as a standby.
_SETTLE_SECONDS = 4.0


@dataclass(eq=False)
class Stream(threading.Thread):
    """Client thread that reads one stream and notes the times of its tokens."""

    url: str
    number: int
    num_tokens: int
    times: list[float] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        """Read the stream to its end."""
        body = {"prompt": f"There was a dog {self.number}", "max_tokens": self.num_tokens, "ignore_eos": True}
        body |= {"temperature": 1.0, "seed": self.number, "stream": True}
        with httpx.stream("POST", self.url, json=body, timeout=300) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def pause_after(self, killed: float) -> float:
        """Return the seconds from the kill to the token that ends the longest gap after it."""
        later = [moment for moment in self.times if moment > killed]
        gaps = zip([killed, *later], later, strict=False)
        return max(gaps, key=lambda gap: gap[1] - gap[0])[1] - killed


def _streams(service: ServiceProcess, count: int, num_tokens: int) -> list[Stream]:
    url = f"http://{service.target.host}:{service.target.port}/v1/completions"
    streams = [Stream(url, number, num_tokens) for number in range(count)]
    for stream in streams:
        stream.start()
    return streams


def _named(service: ServiceProcess, name: str) -> list[psutil.Process]:
    return [process for process in service.all_processes() if process.name() == name]


def kill_once(service: ServiceProcess, count: int, num_tokens: int) -> tuple[list[float], list[str]]:
    """Kill the worker when every stream has a third of its tokens. Return each stream's pause and text."""
    streams = _streams(service, count, num_tokens)
    while any(len(stream.times) < num_tokens // 3 for stream in streams):
        time.sleep(0.01)
    (worker,) = _named(service, "kvasir-worker")
    killed = time.monotonic()
    worker.kill()
    for stream in streams:
        stream.join()
    return [stream.pause_after(killed) for stream in streams], [stream.text for stream in streams]


def measure(checkpoint: Path, counts: Sequence[int], num_tokens: int, repeats: int, flag: str) -> dict[str, Any]:
    """Measure the service with one setting: pauses for each number of streams, and the standby's memory.

    The service exits after more than five worker deaths in a minute: keep `counts` times `repeats` below that.
    """
    levels = []
    with ServiceProcess(checkpoint, (flag,)) as service:
        service.wait_first_token(_FIRST_REQUEST)
        time.sleep(_SETTLE_SECONDS)
        standbys = [process.memory_full_info().uss for process in _named(service, "kvasir-standby")]
        for count in counts:
            undisturbed = _streams(service, count, num_tokens)
            for stream in undisturbed:
                stream.join()
            firsts, lasts, num_changed = [], [], 0
            for _ in range(repeats):
                pauses, texts = kill_once(service, count, num_tokens)
                num_changed += sum(text != stream.text for text, stream in zip(texts, undisturbed, strict=True))
                firsts.append(min(pauses))
                lasts.append(max(pauses))
                time.sleep(_SETTLE_SECONDS)
            levels.append(
                {
                    "num_streams": count,
                    "first_stream_goes_on_seconds": Spread(tuple(firsts)).to_dict(),
                    "last_stream_goes_on_seconds": Spread(tuple(lasts)).to_dict(),
                    "num_texts": count * repeats,
                    "num_texts_changed": num_changed,
                }
            )
    return {"setting": flag, "standby_bytes": standbys, "levels": levels}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_recovery", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there (default: standard output)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], metavar="N", help="default: 1 64")
    parser.add_argument("--output-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(given)
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    settings = []
    try:
        for flag in ("--standby", "--no-standby"):
            settings.append(
                measure(arguments.checkpoint, arguments.streams, arguments.output_tokens, arguments.repeats, flag)
            )
    except ServiceFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    tell({**facts, "kind": "recovery", "settings": settings}, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
