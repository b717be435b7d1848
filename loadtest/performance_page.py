"""docs/performance.md, written from docs/results/*.json: no figure is copied by hand.

python -m loadtest.performance_page            writes the page
python -m loadtest.performance_page --check    exit code 1 when the page is not what the results say
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtest import (
    latency_plot,
    page_aims,
    page_engine,
    page_kernels,
    page_latency,
    page_peers,
    page_scaling,
    performance_plot,
    scaling_plot,
)
from loadtest.page_text import command, model, spread, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "performance.md"
NAMES: Final = ("engine", "service", "frontend", "defaults", "peers", "kernels", "latency", "scaling")
# Of a result, the file of its picture beside the page, and who draws it.
PICTURES: Final = {
    "engine": ("performance-engine.png", performance_plot.draw_engine),
    "peers": ("performance-peers.png", performance_plot.draw_peers),
    "latency": ("latency.png", latency_plot.draw),
    "scaling": ("scaling.png", scaling_plot.draw_scaling),
}

# What the service promises. An idle process still looks up once a second whether its parent lives.
MIN_HTTP_RATIO = 0.9
PROMISED_STREAMS = 16
MAX_IDLE_CPU_PERCENT = 0.5
MAX_API_MB = 150.0
MAX_START_SECONDS = 10.0
MIN_FRONTEND_TOKENS_PER_SECOND = 25_000.0
FRONTEND_STREAMS = 64

_HEAD = """# Performance

Written by `python -m loadtest.performance_page` from `docs/results/`; every figure below comes from the command beside
it. A figure is the median of its repeats, with the smallest and the largest in brackets. A ratio is the median of
ratios within a pair of measurements that were taken one right after the other, so that a slow minute of the machine
touches both. A command without flags that was run before 2026-11-23 means float32 on one thread, the defaults of that
time; the last section has the dates and the machines.
"""


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure the service answers for."""

    figure: str
    promised: str
    measured: str
    kept: bool


def render(results: Mapping[str, dict[str, Any]]) -> str:
    """The page, of the results named in `NAMES`.

    Raises:
        KeyError: a result lacks what the page needs; it was written by another version of the bench.
    """
    parts = [
        _HEAD,
        _promises_table([*promises(results["service"]), *frontend_promises(results["frontend"])]),
        page_aims.section(results),
        page_peers.defaults_section(results["defaults"]),
        page_peers.section(results["peers"], PICTURES["peers"][0]),
        page_engine.section(results["engine"], PICTURES["engine"][0]),
        page_kernels.section(results["kernels"]),
        _service(results["service"]),
        page_latency.section(results["latency"], PICTURES["latency"][0]),
        _frontend(results["frontend"]),
        page_scaling.section(results["scaling"], PICTURES["scaling"][0]),
        _machines(results),
    ]
    return "\n".join(parts)


def frontend_promises(frontend: dict[str, Any]) -> list[Promise]:
    """What the way to the client can carry, when the engine never keeps it waiting."""
    return [
        Promise(
            f"Tokens/s to {FRONTEND_STREAMS} streams by one core, were the engine instant",
            f"at least {MIN_FRONTEND_TOKENS_PER_SECOND:,.0f}",
            spread(level["tokens_per_second_on_one_core"], ",.0f"),
            level["tokens_per_second_on_one_core"]["median"] >= MIN_FRONTEND_TOKENS_PER_SECOND,
        )
        for level in frontend["levels"]
        if level["num_streams"] == FRONTEND_STREAMS and not level["step_ms"]
    ]


def promises(service: dict[str, Any]) -> list[Promise]:
    """Each promise to the clients of the whole service beside what was measured."""
    start, idle = service["start_seconds"], service["idle"]["worker_cpu_percent"]
    api = [process for process in service["processes"] if process["part"] == "api"]
    largest = max(process["rss_mb"] for process in api)
    torch_free = not any(process["torch"] for process in api)
    made = [
        Promise(
            "From start to the first token",
            f"under {MAX_START_SECONDS:g} s",
            f"{spread(start, '.2f')} s",
            start["median"] < MAX_START_SECONDS,
        ),
        Promise(
            "CPU of an idle worker",
            "0 % of a core",
            f"{spread(idle, '.2f')} %",
            idle["median"] < MAX_IDLE_CPU_PERCENT,
        ),
        Promise(
            "API process, resident memory under load",
            f"under {MAX_API_MB:g} MB",
            f"{largest:.0f} MB",
            largest < MAX_API_MB,
        ),
        Promise("API process, torch", "not loaded", "not loaded" if torch_free else "loaded", torch_free),
    ]
    for level in service["levels"]:
        if level["streams"] == PROMISED_STREAMS:
            ratio = level["ratio"]
            figure = f"HTTP throughput at {PROMISED_STREAMS} streams, of the engine's"
            kept = ratio["median"] >= MIN_HTTP_RATIO
            made.append(Promise(figure, f"at least {MIN_HTTP_RATIO:.2f}", spread(ratio, ".2f"), kept))
    return made


def _promises_table(kept: Sequence[Promise]) -> str:
    rows = [[p.figure, p.promised, p.measured, "yes" if p.kept else "**no**"] for p in kept]
    return table(["", "promised", "measured", "kept"], rows)


def _service(result: dict[str, Any]) -> str:
    rows = [
        [
            str(level["streams"]),
            spread(level["http_tokens_per_second"], ".0f"),
            spread(level["engine_tokens_per_second"], ".0f"),
            spread(level["ratio"], ".2f"),
            _latencies(level["http_ttft_ms"]),
            _latencies(level["http_itl_ms"]),
            f"{100 * level['client_cpu_share']['median']:.0f} %",
        ]
        for level in result["levels"]
    ]
    head = ["streams", "HTTP tokens/s", "engine tokens/s", "HTTP, of the engine's"]
    head += ["TTFT p50 / p95 ms", "ITL p50 / p95 ms", "client CPU, of a core"]
    processes = [
        [process["part"], f"{process['rss_mb']:.0f}", str(process["threads"]), "yes" if process["torch"] else "no"]
        for process in result["processes"]
    ]
    workload, idle = result["settings"]["workload"], result["idle"]["service_cpu_percent"]
    prompt = result["levels"][0]["prompt_tokens"]["median"]
    return f"""## The service, over HTTP

{command(result)}

{model(result)}

Clients stream in a closed loop: each sends its next request when its last has ended. Prompts have
about {prompt:.0f} tokens and share no prefix, answers have {workload["output_tokens"]} tokens. The engine's figure is
taken in turn with the HTTP one, in the client's process, with the same prompts and settings. The client runs on the
same machine and takes its CPU from the service.

{table(head, rows)}
The processes after that load; all of them together, idle, use {spread(idle, ".2f")} % of a core.

{table(["process", "resident MB", "threads", "torch"], processes)}"""


def _frontend(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{level['step_ms']:g}" if level["step_ms"] else "instant",
            str(level["num_streams"]),
            spread(level["cpu_us_per_token"], ".0f"),
            spread(level["tokens_per_second_on_one_core"], ",.0f"),
        ]
        for level in result["levels"]
    ]
    head = ["steps every ms", "streams", "CPU of the API process, µs a token", "tokens/s by one core"]
    return f"""## The way to the client

{command(result)}

The service over an engine that computes nothing: what queues, JSON, events and sockets cost. An instant engine is ahead
of them, and a stream's tokens leave several at a time, each an event of its own; at a pace, each is written alone.

{table(head, rows)}"""


def _machines(results: Mapping[str, dict[str, Any]]) -> str:
    rows = []
    for name, result in results.items():
        machine, versions = result["machine"], result["versions"]
        rows.append(
            [
                name,
                result["date"],
                f"`{result['commit']}`",
                f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB",
                f"{result['other_work_cores']:.2f} cores",
                f"{result['took_seconds']:.0f} s",
                f"Python {versions['python']}, torch {versions['torch']}",
            ]
        )
    head = ["", "measured", "commit", "machine", "other work just before", "took", "versions"]
    return f"## Where and when\n\n{table(head, rows)}"


def _latencies(milliseconds: dict[str, float | None]) -> str:
    return " / ".join("–" if milliseconds[name] is None else f"{milliseconds[name]:.1f}" for name in ("p50", "p95"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page. Returns the exit code: 0, 1 for a page that differs, 2 for results missing."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.performance_page", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="has " + ", ".join(f"{name}.json" for name in NAMES),
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/performance.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page differs")
    arguments = parser.parse_args(argv)
    try:
        results = {name: json.loads((arguments.results / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES}
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    page, directory = render(results), arguments.page.parent
    pictures = {name: directory / file for name, (file, _) in PICTURES.items()}
    if not arguments.check:
        arguments.page.write_text(page, encoding="utf-8")
        print(arguments.page)
        for name, path in pictures.items():
            PICTURES[name][1](path, results[name])
            print(path)
        return 0
    stale = [path for name, path in pictures.items() if not performance_plot.shows(path, results[name])]
    if not arguments.page.is_file() or arguments.page.read_text(encoding="utf-8") != page:
        stale.insert(0, arguments.page)
    for path in stale:
        print(f"{path} is not what {arguments.results} says: run {parser.prog}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
