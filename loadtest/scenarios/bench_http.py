"""Benchmark of a running service over HTTP, in a closed loop (`--streams`) or an open loop (`--rate`).

python -m loadtest.scenarios.bench_http --url http://127.0.0.1:8000 --streams 1 4 16 64
python -m loadtest.scenarios.bench_http --url http://127.0.0.1:8000 --rate 2 4 8 16 --slo-ttft-p95-ms 500
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.client import report
from loadtest.client.sse_client import API_KEY_VARIABLE, CompletionClient, Target, api_key_given, discover
from loadtest.client.workload import Workload, add_workload_arguments, spec_from_arguments
from loadtest.measurement.benchmark_program import show
from loadtest.measurement.provenance import provenance
from loadtest.scenarios.closed_and_open_loop import arrivals, run_closed, run_open

# Above this share of a core, the client itself delays what it measures.
_BUSY_CLIENT_SHARE = 0.7


def _measure(arguments: argparse.Namespace, limits: report.Slo) -> list[dict[str, Any]]:
    """Return a result for each closed loop and each open loop of the arguments."""
    target = Target.parse(arguments.url, api_key=api_key_given())
    service = discover(target)
    workload = Workload(spec_from_arguments(arguments, service.max_context_tokens), service.passages)
    model = arguments.model or service.model
    client = CompletionClient(target, timeout_seconds=arguments.timeout)
    # Every load gets new requests, so that the prefix cache does not help it.
    requests = map(workload.request, itertools.count())
    run_closed(client, itertools.islice(requests, arguments.warmup), model=model, num_streams=4)
    results = []
    for streams, rate in [(streams, None) for streams in arguments.streams] + [(None, rate) for rate in arguments.rate]:
        label = f"{rate:g} per s" if streams is None else f"{streams} stream{'s' if streams > 1 else ''}"
        show(label)
        usual = 64 if streams is None else streams * arguments.requests_per_stream
        batch = itertools.islice(requests, arguments.requests or usual)
        if streams is not None:
            run = run_closed(client, batch, model=model, num_streams=streams)
        else:
            run = run_open(client, batch, model=model, offsets=arrivals(rate, arguments.seed))
        result = report.summarize(run, label=label, slo=limits, request_rate=rate, max_concurrency=streams)
        results.append(result | {"model_id": model})
    client.close()
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_http",
        description="Load a running service and measure it over HTTP. Exit code 1: an objective was missed.",
        epilog=f"The API key in {API_KEY_VARIABLE}, if set, is sent to the service.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="base URL of the service (default: %(default)s)")
    add("--model", help="model id (default: the first of /v1/models)")
    add("--streams", type=int, nargs="+", default=[], metavar="N", help="closed loop: concurrent clients")
    text = "open loop: requests per second, Poisson arrivals"
    add("--rate", type=float, nargs="+", default=[], metavar="X", help=text)
    text = "requests per load (default: 64 in an open loop, --requests-per-stream in a closed loop)"
    add("--requests", type=int, metavar="N", help=text)
    text = "requests per client in a closed loop without --requests (default: 4)"
    add("--requests-per-stream", type=int, default=4, metavar="N", help=text)
    add("--warmup", type=int, default=4, metavar="N", help="requests before the first load (default: 4)")
    add("--timeout", type=float, default=120.0, metavar="S", help="timeout of a request in seconds (default: 120)")
    add("--out", type=Path, help="directory for results.json, report.md and report.png")
    add_workload_arguments(parser.add_argument_group("workload"))
    report.add_slo_arguments(parser.add_argument_group("objectives"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loads and report. Return the exit code: 0; 1 for a missed objective; 2 for an unreachable service."""
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    arguments = parser.parse_args(given)
    if not arguments.streams and not arguments.rate:
        arguments.streams = [1, 4, 16, 64]
    try:
        facts = provenance(parser.prog, given)
        results = [result | facts for result in _measure(arguments, report.Slo.from_arguments(arguments))]
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"{parser.prog}: {arguments.url}: {error}", file=sys.stderr)
        return 2
    print(report.markdown(results))
    for result in results:
        if (share := result["client_cpu_share"]) > _BUSY_CLIENT_SHARE:
            print(f"warning: {result['label']}: the client used {share:.0%} of a core", file=sys.stderr)
    if arguments.out is not None:
        for path in report.write(results, arguments.out):
            print(path)
    return 1 if any(result["slo_breaches"] for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
