"""Generator of docs/performance.md from docs/results/*.json: no figure is copied by hand.

python -m loadtest.docgen.performance_page            write the page and its pictures
python -m loadtest.docgen.performance_page --check    exit with 1 if the page or a picture does not match the results
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loadtest.docgen import (
    page_engine,
    page_kernels,
    page_latency,
    page_peers,
    page_scaling,
    page_targets,
    performance_plot,
    scaling_plot,
)
from loadtest.docgen.page_text import command, model, spread, table
from loadtest.measurement.provenance import shows
from loadtest.scenarios import latency_plot

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "performance.md"
NAMES: Final = ("engine", "service", "frontend", "defaults", "peers", "kernels", "latency", "scaling")
# For each result with a picture: the file beside the page, and the function that draws it.
PICTURES: Final = {
    "engine": ("performance-engine.png", performance_plot.draw_engine),
    "peers": ("performance-peers.png", performance_plot.draw_peers),
    "latency": ("latency.png", latency_plot.draw),
    "scaling": ("scaling.png", scaling_plot.draw_scaling),
}

# Limits that the service promises. An idle worker is not at 0: it checks once a second if its parent process lives.
MIN_HTTP_RATIO = 0.9
PROMISED_STREAMS = 16
MAX_IDLE_CPU_PERCENT = 0.5
MAX_API_MB = 150.0
MAX_START_SECONDS = 10.0
MIN_FRONTEND_TOKENS_PER_SECOND = 25_000.0
FRONTEND_STREAMS = 64

_HEAD = """# Performance

`python -m loadtest.docgen.performance_page` writes this page from `docs/results/`. Each section begins with the command
that measured its figures. A figure is the median of its repeats, with the minimum and the maximum in brackets. The two
sides of a ratio are measured one right after the other, so that a slow minute of the machine affects both. The ratio is
the median over such pairs. A command without flags that ran before 2026-11-23 used float32 and one thread, the defaults
of that time. The last section has the dates and the machines.
"""


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure that the service guarantees."""

    figure: str
    promised: str
    measured: str
    kept: bool


def render(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the page for the results named in `NAMES`.

    Raises:
        KeyError: a result lacks a field that the page needs; another version of the benchmark wrote it.
    """
    parts = [
        _HEAD,
        _promises_table([*promises(results["service"]), *frontend_promises(results["frontend"])]),
        page_targets.section(results),
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
    """Return the promise on the API process's throughput with an engine that never makes it wait."""
    return [
        Promise(
            f"Tokens/s per core of the API process, {FRONTEND_STREAMS} streams, instant engine",
            f"at least {MIN_FRONTEND_TOKENS_PER_SECOND:,.0f}",
            spread(level["tokens_per_second_on_one_core"], ",.0f"),
            level["tokens_per_second_on_one_core"]["median"] >= MIN_FRONTEND_TOKENS_PER_SECOND,
        )
        for level in frontend["levels"]
        if level["num_streams"] == FRONTEND_STREAMS and not level["step_ms"]
    ]


def promises(service: dict[str, Any]) -> list[Promise]:
    """Return the promises of the whole service, each with its measurement."""
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
            figure = f"HTTP throughput at {PROMISED_STREAMS} streams, relative to the engine"
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
    head = ["streams", "HTTP tokens/s", "engine tokens/s", "HTTP / engine"]
    head += ["TTFT p50 / p95 ms", "ITL p50 / p95 ms", "client CPU, % of a core"]
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
about {prompt:.0f} tokens and share no prefix. Completions have {workload["output_tokens"]} tokens. The engine runs in
the benchmark's process, with the same prompts and settings, in turn with the HTTP load. The HTTP client runs on the
machine of the service and takes CPU time from it.

{table(head, rows)}
The processes after this load. Idle, they use {spread(idle, ".2f")} % of a core together.

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
    head = ["ms between steps", "streams", "CPU of the API process, µs per token", "tokens/s per core"]
    return f"""## Overhead of the API process

{command(result)}

The service runs with an engine that computes nothing. The figures are the cost of queues, JSON, events and sockets. An
instant engine is faster than they are, so several tokens of a stream are written at a time, each as its own event.
With a pause between steps, each token is written alone.

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
    head = ["", "measured", "commit", "machine", "other load just before", "duration", "versions"]
    return f"## Machines and dates\n\n{table(head, rows)}"


def _latencies(milliseconds: dict[str, float | None]) -> str:
    return " / ".join("–" if milliseconds[name] is None else f"{milliseconds[name]:.1f}" for name in ("p50", "p95"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page and its pictures. Return the exit code: 0; 1 if one differs; 2 if results are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.docgen.performance_page", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="directory with " + ", ".join(f"{name}.json" for name in NAMES),
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/performance.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the page or a picture differs"
    )
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
    stale = [path for name, path in pictures.items() if not shows(path, results[name])]
    if not arguments.page.is_file() or arguments.page.read_text(encoding="utf-8") != page:
        stale.insert(0, arguments.page)
    for path in stale:
        print(f"{path} does not match {arguments.results}; run {parser.prog}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
