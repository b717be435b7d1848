"""Generator of docs/performance.md from docs/results/*.json and a template: no figure is copied by hand.

python -m loadtest.docgen.performance_page            write the page and its pictures
python -m loadtest.docgen.performance_page --check    exit with 1 if the page or a picture does not match the results
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.docgen import pictures
from loadtest.docgen.pictures import MAX_ITL_RATIO
from loadtest.inprocess.bench_engine import DECODE_COLUMNS, PROMPT_COLUMNS
from loadtest.inprocess.bench_kernels import COLUMNS as KERNEL_COLUMNS
from loadtest.measurement.provenance import shows
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.measurement.tables import Column, cell, table, text_table, value_at
from loadtest.peers.comparison_cells import DEFAULTS, QUIET_CORES, STEADY_SHARE, is_sound

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "performance.md"
TEMPLATE = Path(__file__).with_name("performance_template.md")
NAMES: Final = ("engine", "service", "frontend", "defaults", "peers", "kernels", "latency", "scaling")
# For each result with a picture: the file beside the page, and the function that draws it.
PICTURES: Final[dict[str, tuple[str, Callable[[Path, Mapping[str, Any]], None]]]] = {
    "engine": ("performance-engine.png", pictures.draw_engine),
    "peers": ("performance-peers.png", pictures.draw_peers),
    "latency": ("latency.png", pictures.draw_latency),
    "scaling": ("scaling.png", pictures.draw_scaling),
}

FRONTEND_STREAMS, STREAMS = 64, (16, 64)
BANDWIDTH_SHARE, BANDWIDTH_BATCH, BANDWIDTH_CONTEXT = 0.8, 16, 512  # batch and context are minimum values
TTFT_RATIO = 0.5  # Kvasir's 99th percentile relative to another server's
START_RATIO, LARGE_BYTES = 1.3, 9e8  # start relative to reading the checkpoint, for checkpoints from this size
MEMORY_SHARE = 0.03  # relative difference of KV-cache memory from the formula


class Goal(NamedTuple):
    """A promised or wanted figure, with its measurement."""

    figure: str
    wanted: str
    measured: str
    is_reached: bool


def _at_most(limit: float, figure: str, result: Any, key: str, form: str, unit: str = "") -> Goal:
    """Return the goal for the spread or number at `key` of the result. The median of a spread decides."""
    measured = cell(result, Column("", key, form, unit=unit))
    return Goal(figure, f"at most {limit:,g}{unit}", measured, _median(result, key) <= limit)


def _at_least(limit: float, figure: str, result: Any, key: str, form: str) -> Goal:
    measured = cell(result, Column("", key, form))
    return Goal(figure, f"at least {limit:,g}", measured, _median(result, key) >= limit)


def _median(result: Any, key: str) -> float:
    value = value_at(result, key)
    return float(value["median"] if isinstance(value, Mapping) else value)


def promises(service: dict[str, Any], frontend: dict[str, Any]) -> Iterator[Goal]:
    """Yield the promises of the service, each with its measurement."""
    yield _at_most(10.0, "From start to the first token", service, "start_seconds", ".2f", " s")
    # An idle worker is not at 0: it checks once a second if its parent process lives.
    yield _at_most(0.5, "CPU of an idle worker, share of a core", service, "idle.worker_cpu_percent", ".2f", " %")
    api = [process for process in service["processes"] if process["part"] == "api"]
    largest = max(api, key=lambda process: process["rss_mb"])
    yield _at_most(150.0, "API process, resident memory under load", largest, "rss_mb", ".0f", " MB")
    has_torch = any(process["torch"] for process in api)
    yield Goal("API process, torch", "not loaded", "loaded" if has_torch else "not loaded", not has_torch)
    yield from _http_ratios(service, (16,), 0.9)
    for level in frontend["levels"]:
        if level["num_streams"] == FRONTEND_STREAMS and not level["step_ms"]:
            figure = f"Tokens/s per core of the API process, {FRONTEND_STREAMS} streams, instant engine"
            yield _at_least(25_000.0, figure, level, "tokens_per_second_on_one_core", ",.0f")


def _http_ratios(service: dict[str, Any], streams: Sequence[int], limit: float) -> Iterator[Goal]:
    for level in service["levels"]:
        if level["streams"] in streams:
            figure = f"HTTP throughput at {level['streams']} streams, relative to the engine"
            yield _at_least(limit, figure, level, "ratio", ".2f")


def aims(results: Mapping[str, dict[str, Any]]) -> Iterator[Goal]:
    """Yield every aim that is not a promise, except speed relative to other engines."""
    yield from _http_ratios(results["service"], STREAMS, 0.95)
    for level in results["frontend"]["levels"]:
        if level["step_ms"] and level["num_streams"] in STREAMS:
            streams, pace = level["num_streams"], level["step_ms"]
            figure = f"CPU of the API process per token, {streams} streams, a step every {pace:g} ms"
            yield _at_most(30.0, figure, level, "cpu_us_per_token", ".0f", " µs")
    short, long = results["latency"]["short"], results["latency"]["long"]
    figure = f"First token of a short prompt while {short['streams']} streams decode"
    yield _at_most(2.0, figure, short, "steps", ".0f", " steps")
    for point in long["points"]:
        if point["prompt_slowdown"] is not None:
            figure = f"Growth of the streams' ITL p99 by a prompt of {long['prompt_tokens']:,} tokens"
            yield _at_most(MAX_ITL_RATIO, figure, point, "itl_p99_ratio", ".2f")
    ttft_ratios = [
        _ttft_ratio(figure)
        for row in results["peers"]["cells"]
        if row["kind"] == "http" and row["streams"] in STREAMS
        for figure in row["peers"].values()
        if is_sound(figure)
    ]
    if ttft_ratios:
        num_reached = sum(ratio <= TTFT_RATIO for ratio in ttft_ratios)
        figure = f"TTFT p99 at {' and '.join(map(str, STREAMS))} streams, relative to another server"
        measured = f"{min(ttft_ratios):.2f} to {max(ttft_ratios):.2f}; reached in {num_reached} of {len(ttft_ratios)}"
        yield Goal(figure, f"at most {TTFT_RATIO:g}", measured, num_reached == len(ttft_ratios))
    memory, starts = results["scaling"]["kv_memory"], results["scaling"]["starts"]
    furthest = max((point["ratio"] for point in memory["points"]), key=lambda ratio: abs(ratio - 1))
    figure, is_near = "KV-cache memory, relative to the formula", abs(furthest - 1) <= MEMORY_SHARE
    yield Goal(figure, f"within {MEMORY_SHARE:.0%}", f"{furthest:.4f} at worst", is_near)
    for point in starts["points"]:
        for kind in ("warm", "cold") if point["bytes"] >= LARGE_BYTES else ():
            figure = f"Start with {point['bytes'] / 1e9:.2g} GB of weights, files {kind}, relative to reading them"
            yield _at_most(START_RATIO, figure, point, f"{kind}.ratio", ".1f")
    shares = [
        row["share_of_memory"]["median"]
        for row in results["kernels"]["rows"]
        if row["batch"] >= BANDWIDTH_BATCH and row["context"] >= BANDWIDTH_CONTEXT
    ]
    size = f"{BANDWIDTH_BATCH} streams x {BANDWIDTH_CONTEXT} tokens"
    figure, measured = f"Decode attention from {size} up, share of bandwidth", f"{min(shares):.2f} to {max(shares):.2f}"
    yield Goal(figure, f"at least {BANDWIDTH_SHARE:g}", measured, min(shares) >= BANDWIDTH_SHARE)


def _word(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


def _model(result: Mapping[str, Any]) -> str:
    """Return a sentence on the model of a result and its device."""
    facts = result["model"]
    threads = f", {facts['threads']} thread{'' if facts['threads'] == 1 else 's'}" if facts["device"] == "cpu" else ""
    size = f"{facts['parameters'] / 1e6:.1f} million parameters"
    return f"Model `{facts['name']}`, {size}, {facts['dtype']} on {facts['device']}{threads}."


_SERVICE_COLUMNS = (
    Column("streams", "streams"),
    Column("HTTP tokens/s", "http_tokens_per_second", ".0f"),
    Column("engine tokens/s", "engine_tokens_per_second", ".0f"),
    Column("HTTP / engine", "ratio", ".2f"),
    Column("TTFT p50 / p95 ms", "ttft_ms"),
    Column("ITL p50 / p95 ms", "itl_ms"),
    Column("client CPU, % of a core", "client_cpu_share.median", ".0f", 100.0, " %"),
)
_PROCESS_COLUMNS = (
    Column("process", "part"),
    Column("resident MB", "rss_mb", ".0f"),
    Column("threads", "threads"),
    Column("torch", "torch"),
)
_LATENCY_COLUMNS = (
    Column("`--max-batched-tokens`", "max_batched_tokens"),
    Column("`--prompt-slowdown`", "limit"),
    Column("streams' ITL p99 before, ms", "itl_p99_ms_before", ".1f"),
    Column("during, ms", "itl_p99_ms_during", ".1f"),
    Column("ratio", "itl_p99_ratio", ".2f"),
    Column("TTFT of the prompt, ms", "ttft_ms", ".0f"),
)
_FRONTEND_COLUMNS = (
    Column("ms between steps", "pace"),
    Column("streams", "num_streams"),
    Column("CPU of the API process, µs per token", "cpu_us_per_token", ".0f"),
    Column("tokens/s per core", "tokens_per_second_on_one_core", ",.0f"),
)
_MEMORY_COLUMNS = (
    Column("tokens", "tokens", ","),
    Column("MB", "bytes", ".1f", 1e-6),
    Column("formula, MB", "formula", ".1f", 1e-6),
    Column("ratio", "ratio", ".4f"),
)
_PREFIX_COLUMNS = (
    Column("shared tokens", "shared_tokens"),
    Column("cached tokens", "hits"),
    Column("other tokens", "rest_tokens"),
    Column("TTFT ms", "ttft_ms", ".1f"),
    Column("TTFT ms, other tokens alone", "rest_alone_ms", ".1f"),
    Column("ratio", "ratio", ".2f"),
)
_START_COLUMNS = (
    Column("MB of weights", "bytes", ".0f", 1e-6),
    Column("files", "kind"),
    Column("start to first token, s", "start_seconds", ".2f"),
    Column("read, s", "read_seconds", ".3f"),
    Column("ratio", "ratio", ".1f"),
)
# Wanted ratio of Kvasir to the best peer of the same precision, by number of streams.
_DECODE_AIMS = {
    "bfloat16": {1: 1.0, 4: 1.2, 16: 1.5, 64: 1.5},
    "int8": {1: 1.0, 4: 1.1, 16: 1.1, 64: 1.3},
    "float32": {1: 1.0, 4: 1.0, 16: 1.0, 64: 1.0},
}
_PROMPT_AIM = 1.0
_HTTP_AIMS = {16: 1.5, 64: 1.5}
_DEFAULTS_AIMS = {1: 1.0, 16: 3.0, 64: 3.0}  # both servers started without flags
_WHAT = {"decode": "decoding", "prompt": "prompt", "http": "HTTP, streaming"}
_AIM = (Column("aim", "aim"), Column("reached", "reached"))
_BEST_COLUMNS = (
    Column("shape", "shape"),
    Column("precision", "precision"),
    Column("what", "what"),
    Column("streams", "streams"),
    Column("context", "context"),
    Column("best peer", "peer"),
    Column("ratio to it", "ratio", ".2f"),
    *_AIM,
)
_DEFAULTS_COLUMNS = (
    Column("shape", "shape"),
    Column("streams", "streams"),
    Column("peer", "peer"),
    Column("Kvasir, tokens/s", "ours_rate"),
    Column("peer, tokens/s", "theirs.tokens_per_second", ".1f"),
    Column("ratio", "ratio", ".2f"),
    *_AIM,
)
_TTFT_COLUMNS = (
    Column("shape", "shape"),
    Column("precision", "precision"),
    Column("streams", "streams"),
    Column("peer", "peer"),
    Column("Kvasir, TTFT p50 / p99 ms", "ours_ttft"),
    Column("peer, TTFT p50 / p99 ms", "theirs_ttft"),
    Column("p99 ratio", "ttft_ratio", ".2f"),
    Column("client CPU, % of a core", "ours.client_cpu_share.median", ".0f", 100.0, " %"),
)
_MACHINE_COLUMNS = (
    Column("", "name"),
    Column("measured", "date"),
    Column("commit", "commit"),
    Column("machine", "machine"),
    Column("other load just before", "other_work_cores", ".2f", unit=" cores"),
    Column("duration", "took_seconds", ".0f", unit=" s"),
    Column("versions", "versions"),
)


def _service(results: Mapping[str, Any]) -> dict[str, Any]:
    service, frontend = results["service"], results["frontend"]
    levels = [
        level | {f"{name}_ms": _p50_p95(level[f"http_{name}_ms"]) for name in ("ttft", "itl")}
        for level in service["levels"]
    ]
    paces = [
        level | {"pace": f"{level['step_ms']:g}" if level["step_ms"] else "instant"} for level in frontend["levels"]
    ]
    return {
        "service_model": _model(service),
        "service_prompt_tokens": service["levels"][0]["prompt_tokens"]["median"],
        "service": table(_SERVICE_COLUMNS, levels),
        "service_processes": table(_PROCESS_COLUMNS, service["processes"]),
        "frontend": table(_FRONTEND_COLUMNS, paces),
    }


def _p50_p95(milliseconds: dict[str, float | None]) -> str:
    return " / ".join(cell(milliseconds, Column("", name, ".1f")) for name in ("p50", "p95"))


def _scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    memory, starts, kinds = scaling["kv_memory"], scaling["starts"], ("warm", "cold")
    is_near = all(abs(point["ratio"] - 1) <= MEMORY_SHARE for point in memory["points"])
    rows = [point[kind] | {"kind": kind, "bytes": point["bytes"]} for kind in kinds for point in starts["points"]]
    lines = []
    for kind in kinds:
        start, read = starts[kind]["start"]["line"], starts[kind]["read"]["line"]
        lines.append(
            f"With {kind} files a start takes {start['fixed']:.2f} s plus {start['each']:.2f} s per GB; "
            f"a read takes {read['each']:.2f} s per GB."
        )
    large = [row["ratio"]["median"] for row in rows if row["bytes"] >= LARGE_BYTES]
    if large:
        is_fast = _word(max(large) <= START_RATIO)
        lines.append(f"The largest checkpoint starts within {START_RATIO} times its read: {is_fast}.")
    return {
        "scaling_model": _model(scaling),
        "scaling_steps": _step_fits(scaling["steps"]),
        "memory_share": MEMORY_SHARE,
        "is_memory_near": _word(is_near),
        "scaling_memory": table(_MEMORY_COLUMNS, memory["points"]),
        "scaling_prefixes": table(_PREFIX_COLUMNS, scaling["prefixes"]["points"]),
        "start_lines": " ".join(lines),
        "scaling_starts": table(_START_COLUMNS, rows),
    }


def _step_fits(steps: Mapping[str, Any]) -> str:
    rows = []
    for name, key, other_name, other in (
        ("batch", "batch_size", "context", "context_length"),
        ("context", "context_length", "batch", "batch_size"),
    ):
        curve = steps[f"over_{name}"]
        law, line, first, last = curve["fits"]["power"], curve["fits"]["line"], curve["points"][0], curve["points"][-1]
        rows.append(
            [
                f"{name}, {first[key]} to {last[key]}",
                f"{other_name} {first[other]}",
                f"{first['step_ms']['median']:.2f} to {last['step_ms']['median']:.2f}",
                f"{law['exponent']:.2f}",
                f"{law['last']:.2f}",
                f"{line['fixed']:.2f} + {line['each']:.4f} n",
            ]
        )
    head = ("decode step over", "at", "ms", "exponent", "exponent, last two", "ms as a function of n")
    return text_table(head, rows)


def aim(row: Mapping[str, Any]) -> float | None:
    """Return the wanted ratio of Kvasir to the best peer, or None without an aim."""
    if row["precision"] == DEFAULTS:
        return _DEFAULTS_AIMS.get(row["streams"])
    if row["kind"] == "http":
        return _HTTP_AIMS.get(row["streams"])
    return _PROMPT_AIM if row["kind"] == "prompt" else _DECODE_AIMS[row["precision"]][row["streams"]]


def _pairs(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a cell's sound figures, one row per peer, with the cell's sizes and its aim.

    An aim stays open if the figure of another peer was disturbed.
    """
    sound = {name: figure for name, figure in row["peers"].items() if is_sound(figure)}
    disturbed = [name for name, figure in row["peers"].items() if "ratio" in figure and name not in sound]
    reached = f"open: {', '.join(disturbed)} †" if disturbed else "yes"
    wanted = aim(row)
    rates = [value for figure in sound.values() for value in figure["ours"]["tokens_per_second"]["values"]]
    context = "prompt_tokens" if row["kind"] == "prompt" else "context_length"
    rows = []
    for name, figure in sound.items():
        pair = {
            **{key: row[key] for key in ("shape", "precision", "streams")},
            **figure,
            "context": row[context],
            "what": _WHAT[row["kind"]],
            "peer": name,
            "aim": "" if wanted is None else f"{wanted:.1f}",
            "reached": "" if wanted is None else "**no**" if figure["ratio"]["median"] < wanted else reached,
            "ours_rate": cell({"rate": spread(rates)}, Column("", "rate", ".0f" if max(rates) >= 100 else ".1f")),
        }
        if row["kind"] == "http":
            pair |= {f"{side}_ttft": _ttfts(figure[side]) for side in ("ours", "theirs")}
            pair["ttft_ratio"] = _ttft_ratio(figure)
        rows.append(pair)
    return rows


def _ttft_ratio(figure: Mapping[str, Any]) -> float:
    """Return Kvasir's TTFT p99 divided by the peer's, as the median over pairs."""
    sides = (figure[side]["ttft_p99_ms"]["values"] for side in ("ours", "theirs"))
    return float(ratio_spread(*sides)["median"])


def _ttfts(side: Mapping[str, Any]) -> str:
    return " / ".join(f"{side[f'ttft_{percentile}_ms']['median']:.0f}" for percentile in ("p50", "p99"))


def peers_tables(result: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's tables of the comparison, and of servers without flags (only checkpoint, address and port)."""
    notes = {
        name: peer["note"] if peer["unavailable"] is None else f"**not available here:** {peer['unavailable']}"
        for name, peer in result["peers"].items()
    }
    peers = [
        {"name": name, "pins": ", ".join(peer["pins"]), "note": notes[name]} for name, peer in result["peers"].items()
    ]
    default_pairs = [pair for row in defaults["cells"] for pair in _pairs(row)]
    best = [min(sound, key=lambda pair: pair["ratio"]["median"]) for row in result["cells"] if (sound := _pairs(row))]
    return {
        "quiet_cores": QUIET_CORES,
        "steady_share": STEADY_SHARE,
        "peers_shapes": _shapes(result),
        "peers": table((Column("", "name"), Column("versions", "pins"), Column("as", "note")), peers),
        "peers_best": table(_BEST_COLUMNS, best),
        "peers_details": _details(result),
        "defaults_shapes": _shapes(defaults),
        "defaults": table(_DEFAULTS_COLUMNS, default_pairs),
        "defaults_latencies": table(_TTFT_COLUMNS, default_pairs),
    }


def _shapes(result: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name}: {sizes['num_layers']} layers, width {sizes['hidden_size']}, "
        f"{sizes['num_heads']}/{sizes['num_kv_heads']} heads, MLP {sizes['mlp_size']}, "
        f"vocabulary {sizes['vocab_size']:,}"
        for name, sizes in result["shapes"].items()
    )


def _details(result: Mapping[str, Any]) -> str:
    """Return a table for each kind of cell, with a column for each peer, and a table of failures."""
    parts = []
    for kind, title in _WHAT.items():
        measured = [(row, sound) for row in result["cells"] if row["kind"] == kind and (sound := _pairs(row))]
        if not measured:
            continue
        names = list(dict.fromkeys(name for row, _ in measured for name in row["peers"]))
        head = ["shape", "precision", "streams", "context", "Kvasir, tokens/s"]
        rows = [
            [*(str(sound[0][key]) for key in ("shape", "precision", "streams", "context", "ours_rate"))]
            + [_figure(row["peers"].get(name)) for name in names]
            for row, sound in measured
        ]
        heads = [*head, *(f"{name}, tokens/s; ratio" for name in names)]
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n{text_table(heads, rows)}")
        if kind == "http":
            parts.append(table(_TTFT_COLUMNS, (pair for _, sound in measured for pair in sound)))
    failed = [(name, figure) for row in result["cells"] for name, figure in row["peers"].items() if "error" in figure]
    counts = Counter((name, figure["error"]) for name, figure in failed)
    if counts:
        columns = (Column("peer", "peer"), Column("cells", "cells"), Column("reason", "reason"))
        rows_failed = [{"peer": name, "cells": n, "reason": error} for (name, error), n in counts.items()]
        parts.append(f"Failures:\n\n{table(columns, rows_failed)}")
    return "\n".join(parts)


def _figure(figure: Mapping[str, Any] | None) -> str:
    if figure is None or not is_sound(figure):
        return "†" if figure is not None and "ratio" in figure else ""
    return f"{figure['theirs']['tokens_per_second']['median']:.0f}; {cell(figure, Column('', 'ratio', '.2f'))}"


def machine_table(results: Mapping[str, Any]) -> str:
    """Return a table of the commit, machine and date of each result."""
    rows = []
    for name, result in results.items():
        machine, versions = result["machine"], result["versions"]
        facts = {
            "name": name,
            "commit": f"`{result['commit']}`",
            "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB",
            "versions": f"Python {versions['python']}, torch {versions['torch']}",
        }
        rows.append(result | facts)
    return table(_MACHINE_COLUMNS, rows)


def render(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the page for the results named in `NAMES`.

    A placeholder of the template is the path of a figure with its format, for example `{engine.roofline.gflops:.0f}`.
    `page` holds the tables.

    Raises:
        KeyError: a result lacks a field that the page needs; another version of the benchmark wrote it.
    """
    kept, aimed = (
        [[goal.figure, goal.wanted, goal.measured, _word(goal.is_reached)] for goal in goals]
        for goals in (promises(results["service"], results["frontend"]), aims(results))
    )
    engine, points = results["engine"], results["latency"]["long"]["points"]
    limits = [point | {"limit": str(point["prompt_slowdown"] or "inf")} for point in points]
    page = {
        "promises": text_table(("", "promised", "measured", "kept"), kept),
        "aims": text_table(("", "aim", "measured", "reached"), aimed),
        "engine_model": _model(engine),
        "engine_decode": table(DECODE_COLUMNS, engine["decode"]),
        "engine_prompts": table(PROMPT_COLUMNS, engine["prompts"]),
        "kernels": table(KERNEL_COLUMNS, results["kernels"]["rows"]),
        "latency": table(_LATENCY_COLUMNS, limits),
        "machines": machine_table(results),
        **peers_tables(results["peers"], results["defaults"]),
        **_service(results),
        **_scaling(results["scaling"]),
    }
    known = {**results, "page": page}

    def fill(match: re.Match[str]) -> str:
        root, *path = match[1].split(".")
        if root == "page" and isinstance(page[path[0]], str):
            return str(page[path[0]])
        return cell(known, Column("", match[1], match[2] or ""))

    return re.sub(r"\{([\w.]+)(?::([^}]*))?\}", fill, TEMPLATE.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page and its pictures. Return the exit code: 0; 1 if one differs; 2 if results are missing."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.docgen.performance_page", description="Write the page.")
    text = "directory with " + ", ".join(f"{name}.json" for name in NAMES)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=text)
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/performance.md")
    text = "write nothing; exit with 1 if the page or a picture differs"
    parser.add_argument("--check", action="store_true", help=text)
    arguments = parser.parse_args(argv)
    try:
        results = {name: json.loads((arguments.results / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES}
    except OSError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    pictures = {arguments.page.parent / file: (draw, results[name]) for name, (file, draw) in PICTURES.items()}
    return write_or_check(parser.prog, arguments.page, render(results), pictures, check=arguments.check)


def write_or_check(
    program: str,
    path: Path,
    page: str,
    pictures: Mapping[Path, tuple[Callable[[Path, Any], None], Any]],
    *,
    check: bool,
) -> int:
    """Write a page and its pictures, or check that the files match. Return the exit code: 0; 1 if a file differs.

    pictures: for each file, the function that draws it and the result that it shows.
    """
    if not check:
        path.write_text(page, encoding="utf-8")
        for picture, (draw, result) in pictures.items():
            draw(picture, result)
        print(path, *pictures, sep="\n")
        return 0
    stale = [picture for picture, (_, result) in pictures.items() if not shows(picture, result)]
    if not path.is_file() or path.read_text(encoding="utf-8") != page:
        stale.insert(0, path)
    for file in stale:
        print(f"{file} does not match its results; run {program}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
