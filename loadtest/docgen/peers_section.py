"""Tables of docs/performance.md on other engines: aims and every measured cell, lost cells included."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.measurement.spread import Spread
from loadtest.measurement.tables import Column, cell, table, text_table
from loadtest.peers.comparison_cells import DEFAULTS, QUIET_CORES, STEADY_SHARE, is_sound

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
_LATENCY_COLUMNS = (
    Column("shape", "shape"),
    Column("precision", "precision"),
    Column("streams", "streams"),
    Column("peer", "peer"),
    Column("Kvasir, TTFT p50 / p99 ms", "our_ttft"),
    Column("peer, TTFT p50 / p99 ms", "their_ttft"),
    Column("p99 ratio", "ttft_ratio", ".2f"),
    Column("client CPU, % of a core", "ours.client_cpu_share.median", ".0f", 100.0, " %"),
)


def aim(row: Mapping[str, Any]) -> float | None:
    """Return the wanted ratio of Kvasir to the best peer, or None without an aim."""
    if row["precision"] == DEFAULTS:
        return _DEFAULTS_AIMS.get(row["streams"])
    if row["kind"] == "http":
        return _HTTP_AIMS.get(row["streams"])
    return _PROMPT_AIM if row["kind"] == "prompt" else _DECODE_AIMS[row["precision"]][row["streams"]]


def pairs(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a cell's sound figures, one row per peer, with the cell's sizes and its aim.

    An aim stays open if the figure of another peer was disturbed.
    """
    sound = {name: figure for name, figure in row["peers"].items() if is_sound(figure)}
    disturbed = [name for name, figure in row["peers"].items() if "ratio" in figure and name not in sound]
    wanted = aim(row)
    rows = []
    for name, figure in sound.items():
        reached = f"open: {', '.join(disturbed)} †" if disturbed else "yes"
        sizes = {"context": row["prompt_tokens"] if row["kind"] == "prompt" else row["context_length"]}
        rows.append(
            {
                **{key: row[key] for key in ("shape", "precision", "streams", "kind")},
                **sizes,
                **figure,
                "what": _WHAT[row["kind"]],
                "peer": name,
                "aim": "" if wanted is None else f"{wanted:.1f}",
                "reached": "" if wanted is None else "**no**" if figure["ratio"]["median"] < wanted else reached,
                "ours_rate": _our_rate(sound.values()),
            }
        )
    return rows


def _our_rate(figures: Any) -> str:
    """Return Kvasir's tokens/s over the pairs with all peers."""
    values = [value for figure in figures for value in figure["ours"]["tokens_per_second"]["values"]]
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return cell({"rate": spread}, Column("", "rate", ".0f" if max(values) >= 100 else ".1f"))


def _latencies(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        _LATENCY_COLUMNS,
        (
            pair
            | {
                "our_ttft": _ttfts(pair["ours"]),
                "their_ttft": _ttfts(pair["theirs"]),
                "ttft_ratio": Spread.of_ratios(*(pair[s]["ttft_p99_ms"]["values"] for s in ("ours", "theirs"))).median,
            }
            for row in rows
            for pair in pairs(row)
        ),
    )


def _ttfts(side: Mapping[str, Any]) -> str:
    return " / ".join(f"{side[f'ttft_{percentile}_ms']['median']:.0f}" for percentile in ("p50", "p99"))


def values(result: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page's tables of the comparison, and of servers without flags (only checkpoint, address and port)."""
    notes = {
        name: peer["note"] if peer["unavailable"] is None else f"**not available here:** {peer['unavailable']}"
        for name, peer in result["peers"].items()
    }
    peers = [
        {"name": name, "pins": ", ".join(peer["pins"]), "note": notes[name]} for name, peer in result["peers"].items()
    ]
    best = [min(sound, key=lambda pair: pair["ratio"]["median"]) for row in result["cells"] if (sound := pairs(row))]
    return {
        "quiet_cores": QUIET_CORES,
        "steady_share": STEADY_SHARE,
        "peers_shapes": _shapes(result),
        "peers": table((Column("", "name"), Column("versions", "pins"), Column("as", "note")), peers),
        "peers_best": table(_BEST_COLUMNS, best),
        "peers_details": _details(result),
        "defaults_shapes": _shapes(defaults),
        "defaults": table(_DEFAULTS_COLUMNS, [pair for row in defaults["cells"] for pair in pairs(row)]),
        "defaults_latencies": _latencies(defaults["cells"]),
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
        measured = [(row, sound) for row in result["cells"] if row["kind"] == kind and (sound := pairs(row))]
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
            parts.append(_latencies([row for row, _ in measured]))
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
