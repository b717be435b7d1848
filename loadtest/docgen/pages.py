"""Generator of docs/performance.md and of its picture.

    python -m loadtest.docgen.pages [--check]

All figures come from the JSON files in docs/results. The text is a template, performance_template.md in this folder,
with three kinds of placeholders:

    {engine.roofline.gflops:.0f*1e-9}   a figure: path in the results, format, factor
    {service.start_seconds<=10}         "yes", or "**no**" if the figure or its median misses the limit
    {*engine.decode}| {step_ms} |       a line for each item of a list; paths are looked up in the item first
"""

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from loadtest.inprocess.bench_engine import DECODE_COLUMNS, PROMPT_COLUMNS
from loadtest.measurement.benchmark_program import QUIET_CORES, digest, is_picture_of
from loadtest.measurement.figures import Column, cell, ratio_spread, spread, table, value_at
from loadtest.peers.bench_peers import STEADY_SHARE, is_sound
from loadtest.peers.engines import DEFAULTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "results"
# Comparisons of parts of models_avx2, oldest first.
_NEWER_AVX2 = ("renewed_avx2", "quantized_avx2", "prompts_avx2", "one_stream_avx2")
NAMES: Final = (
    "engine",
    "service",
    "frontend",
    "defaults",
    "default_gguf",
    "models",
    "peers",
    "models_avx2",
    *_NEWER_AVX2,
    "latency",
)
_PLACEHOLDER = re.compile(
    r"^\{\*(?P<rows>[\w.-]+)\}(?P<line>.*\n)"
    r"|\{(?P<path>[\w.-]+)(?:(?P<sign>[<>])=(?P<limit>[\d.]+))?(?::(?P<form>[^}*]*))?(?:\*(?P<scale>[\de.-]+))?\}",
    re.MULTILINE,
)

_STREAMS = (16, 64)  # numbers of streams with a target
_TTFT_RATIO = 0.5  # wanted TTFT p99 of Kvasir relative to another server's
# Wanted speed of Kvasir relative to the best peer, by number of streams, but for 4 bits. The precisions are those of
# decoding.
_AIMS: Final = {
    "bfloat16": {1: 1.0, 4: 1.2, 16: 1.5, 64: 1.5},
    "int8": {1: 1.0, 4: 1.1, 16: 1.1, 64: 1.3},
    "float32": {1: 1.0, 4: 1.0, 16: 1.0, 64: 1.0},
    "prompt": {1: 1.0},
    "http": {16: 1.5, 64: 1.5},
    **{key: {1: 1.0, 16: 3.0, 64: 3.0} for key in DEFAULTS},  # both servers started without flags
}
# In 4 bits every peer has an aim of its own: llama.cpp by kind and number of streams, the others the same one.
_FOUR_BITS = ("int4", "q4_k_m")
_LLAMA_CPP_AIMS: Final = {"decode": {1: 1.2, 4: 2.2, 16: 3.5, 64: 3.5}, "prompt": {1: 3.0}}
_OTHERS_AIM = 1.1
_LEADING = ("qwen3-0.6b", "llama-3.2-1b")  # shapes that the page begins with
_KINDS = {"decode": "decoding", "prompt": "prompt", "http": "HTTP, streaming"}


def fill(template: str, facts: Mapping[str, Any]) -> str:
    """Return the template with each placeholder replaced by its figure. Raises KeyError if a figure is missing."""

    def replacement(match: re.Match[str]) -> str:
        if match["rows"]:
            rows = value_at(facts, match["rows"])
            return "".join(
                fill(match["line"], {**facts, **row}) for row in (rows if isinstance(rows, list) else [rows])
            )
        value = value_at(facts, match["path"])
        if match["path"].startswith("tables."):
            return str(value)  # finished Markdown
        if match["limit"]:
            figure, limit = value["median"] if isinstance(value, Mapping) else value, float(match["limit"])
            return "yes" if (figure <= limit if match["sign"] == "<" else figure >= limit) else "**no**"
        return cell({"": value}, Column("", "", match["form"] or "", float(match["scale"] or 1)))

    return _PLACEHOLDER.sub(replacement, template)


def _named(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "name": name} for name, row in rows.items()]


def performance_page(results: Mapping[str, Any]) -> str:
    """Return the text of docs/performance.md with figures from `results`. Raises KeyError if a figure is missing."""
    service, frontend = results["service"], results["frontend"]["levels"]
    points = [point | {"limit": point["prompt_slowdown"] or "inf"} for point in results["latency"]["long"]["points"]]
    api = [process for process in service["processes"] if process["part"] == "api"]
    avx2_pairs = [
        pair
        for row in _renewed(*(results[name] for name in ("models_avx2", *_NEWER_AVX2)))
        for pair in compared_pairs(row)
    ]
    defaults = (results["defaults"], results["default_gguf"])
    peer_facts = _peer_facts(results["models"], results["peers"], defaults, avx2_pairs)
    facts = {
        **results,
        "tables": {
            "engine_decode": table(DECODE_COLUMNS, results["engine"]["decode"]),
            "engine_prompts": table(PROMPT_COLUMNS, results["engine"]["prompts"]),
        },
        "quiet": {"cores": QUIET_CORES, "steady_share": STEADY_SHARE},
        "machines": _named(results),
        "api": {
            "rss_mb": max(process["rss_mb"] for process in api),
            "num_torch": sum(process["torch"] for process in api),
            "torch": "loaded" if any(process["torch"] for process in api) else "not loaded",
        },
        "http_16": [level for level in service["levels"] if level["streams"] == 16],
        "http_aims": [level for level in service["levels"] if level["streams"] in _STREAMS],
        "instant": [level for level in frontend if level["num_streams"] == 64 and not level["step_ms"]],
        "paced": [level for level in frontend if level["num_streams"] in _STREAMS and level["step_ms"]],
        "paces": [level | {"pace": f"{level['step_ms']:g}" if level["step_ms"] else "instant"} for level in frontend],
        "chunk_limits": points,
        "slowdown_limits": [point for point in points if point["prompt_slowdown"] is not None],
        **peer_facts,
        "avx2_pairs": {
            "engine": [pair for pair in avx2_pairs if pair["kind"] != "http"],
            "http": [pair for pair in avx2_pairs if pair["kind"] == "http"],
        },
        "avx2_engines": _engines(results["models_avx2"]["peers"]),
        "leading_head": peer_facts["leading_pairs"][:1],
    }
    return fill(Path(__file__).with_name("performance_template.md").read_text(encoding="utf-8"), facts)


def _peer_facts(
    models: Mapping[str, Any],
    peers: Mapping[str, Any],
    defaults: Sequence[Mapping[str, Any]],
    avx2_pairs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    cells = sorted([*models["cells"], *peers["cells"]], key=lambda row: [row["shape"] != shape for shape in _LEADING])
    compared = [pairs for row in cells if (pairs := compared_pairs(row))]
    best = [min(pairs, key=lambda pair: pair["ratio"]["median"]) for pairs in compared]
    every = [pair for pairs in compared for pair in pairs]
    ttfts = [pair["ttft_ratio"] for pair in every if pair["kind"] == "http" and pair["streams"] in _STREAMS]
    num_reached = sum(ratio <= _TTFT_RATIO for ratio in ttfts)
    ttft = [{"low": min(ttfts), "high": max(ttfts), "num_reached": num_reached, "num": len(ttfts)}] if ttfts else []
    failures = Counter(
        (name, figure["error"]) for row in cells for name, figure in row["peers"].items() if "error" in figure
    )
    return {
        "ttft": ttft,
        "peer_shapes": _named(models["shapes"] | peers["shapes"]),
        "default_shapes": _named({name: shape for part in defaults for name, shape in part["shapes"].items()}),
        "default_pairs": [pair for part in defaults for row in part["cells"] for pair in compared_pairs(row)],
        "slower_pairs": [
            {**pair, "level": level}
            for level, pairs in (("AVX-512, bfloat16", every), ("AVX2", avx2_pairs))
            for pair in pairs
            if pair["ratio"]["median"] < 1
        ],
        "leading_pairs": [pair for pair in best if pair["shape"] in _LEADING],
        "pairs": {kind: [pair for pair in every if pair["kind"] == kind] for kind in _KINDS},
        "failures": [{"peer": name, "cells": count, "reason": error} for (name, error), count in failures.items()],
        "engines": _engines(peers["peers"] | models["peers"]),
    }


def _renewed(*comparisons: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells (configurations) of comparisons, the oldest first. Undisturbed pairs replace older pairs."""
    own = ("shape", "precision", "kind", "streams", "context_length")
    cells: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for comparison in comparisons for row in comparison["cells"]):
        key = tuple(row[name] for name in own)
        earlier = cells.get(key, {"peers": {}})["peers"]
        kept = {name: figure for name, figure in row["peers"].items() if name not in earlier or is_sound(figure)}
        cells[key] = row | {"peers": earlier | kept}
    return list(cells.values())


def _engines(peers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "pins": ", ".join(peer["pins"]),
            "note": f"**not available here:** {peer['unavailable']}" if peer["unavailable"] else peer["note"],
        }
        for name, peer in peers.items()
    ]


def compared_pairs(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table rows of one cell (configuration) of the peer comparison, one per peer with undisturbed figures.

    A row has the cell's sizes and the wanted speed of Kvasir relative to the best peer, or in 4 bits to this peer. A
    row that reaches it says "yes", or "open" if the figures of another peer, possibly the best peer, were disturbed.
    """
    sound = {name: figure for name, figure in row["peers"].items() if is_sound(figure)}
    disturbed = [name for name, figure in row["peers"].items() if "ratio" in figure and name not in sound]
    is_four_bits = row["precision"] in _FOUR_BITS and row["kind"] != "http"
    reached = f"open: {', '.join(disturbed)} †" if disturbed and not is_four_bits else "yes"
    pairs = []
    for name, figure in sound.items():
        aim = _four_bit_aim(row, name) if is_four_bits else _best_peer_aim(row)
        rates = figure["ours"]["tokens_per_second"]["values"]
        pair = {
            **row,
            **figure,
            "context": row["prompt_tokens" if row["kind"] == "prompt" else "context_length"],
            "what": _KINDS[row["kind"]],
            "peer": name,
            "aim": "" if aim is None else f"{aim:.1f}",
            "reached": "" if aim is None else "**no**" if figure["ratio"]["median"] < aim else reached,
            "ours_rate": cell({"rate": spread(rates)}, Column("", "rate", ".0f" if max(rates) >= 100 else ".1f")),
        }
        if row["kind"] == "http":
            for side in ("ours", "theirs"):
                p50, p99 = (figure[side][f"ttft_{percentile}_ms"]["median"] for percentile in ("p50", "p99"))
                pair[f"{side}_ttft"] = f"{p50:.0f} / {p99:.0f}"
            ttfts = (figure[side]["ttft_p99_ms"]["values"] for side in ("ours", "theirs"))
            pair["ttft_ratio"] = ratio_spread(*ttfts)["median"]
        pairs.append(pair)
    return pairs


def _best_peer_aim(row: Mapping[str, Any]) -> float | None:
    is_by_precision = row["kind"] == "decode" or row["precision"] in DEFAULTS
    return _AIMS.get(row["precision"] if is_by_precision else row["kind"], {}).get(row["streams"])


def _four_bit_aim(row: Mapping[str, Any], peer: str) -> float | None:
    return _LLAMA_CPP_AIMS[row["kind"]].get(row["streams"]) if peer == "llama.cpp" else _OTHERS_AIM


def draw_peers(path: Path, result: Mapping[str, Any]) -> None:
    """Draw decode speed of all compared engines over the number of streams: a panel per model shape and precision."""
    cells = [row for row in result["cells"] if row["kind"] == "decode" and any(map(is_sound, row["peers"].values()))]
    shortest = min((row["prompt_tokens"] for row in cells), default=0)
    cells = [row for row in cells if row["prompt_tokens"] == shortest]
    panels = list(dict.fromkeys((row["shape"], row["precision"]) for row in cells))
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4 * columns, 3.4 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        own = [row for row in cells if (row["shape"], row["precision"]) == panel]
        for number, name in enumerate(("ours", *result["peers"])):
            lines = []
            for row in own:
                side, names = ("ours", list(row["peers"])) if name == "ours" else ("theirs", [name])
                sound = [peer for each in names if is_sound(peer := row["peers"].get(each, {}))]
                if rates := [rate for peer in sound for rate in peer[side]["tokens_per_second"]["values"]]:
                    lines.append((row["streams"], statistics.median(rates)))
            if lines:
                width = 2.5 if name == "ours" else 1.2
                axes.plot(*zip(*lines, strict=True), "o-", color=f"C{number}", linewidth=width, label=name)
        axes.set_title(" ".join(panel), fontsize=9)
        ticks = sorted({row["streams"] for row in own})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xlabel("streams")
        axes.set_ylabel("tokens/s")
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=7)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=80, metadata={"Source": digest(result), "Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page and its picture. Return the exit code: 0; 1 if `--check` fails; 2 for missing results."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.docgen.pages", description="Write docs/performance.md.")
    text = "folder of the benchmark results (default: docs/results)"
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=text)
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="folder of the page (default: docs)")
    text = "write nothing; exit with 1 if the page or the picture does not match the results"
    parser.add_argument("--check", action="store_true", help=text)
    arguments = parser.parse_args(argv)
    path, picture = arguments.docs / "performance.md", arguments.docs / "performance-peers.png"
    try:
        texts = {name: (arguments.results / f"{name}.json").read_text(encoding="utf-8") for name in NAMES}
        results = {name: json.loads(text) for name, text in texts.items()}
        page = performance_page(results)
    except (OSError, ValueError, KeyError) as error:
        reason = f"the results lack {error}; run the benchmark again" if isinstance(error, KeyError) else error
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    if not arguments.check:
        path.write_text(page, encoding="utf-8")
        draw_peers(picture, results["peers"])
        print(path, picture, sep="\n")
        return 0
    stale = [] if path.is_file() and path.read_text(encoding="utf-8") == page else [path]
    stale += [] if is_picture_of(picture, results["peers"]) else [picture]
    for file in stale:
        print(f"{file} does not match the benchmark results; run {parser.prog}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
