"""Sections of docs/performance.md on other engines: aims and every measured cell, lost cells included."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.docgen.page_text import command, spread, table
from loadtest.measurement.spread import Spread
from loadtest.peers.comparison_cells import DEFAULTS, QUIET_CORES, STEADY_SHARE, is_sound

# OutputConstraint ratio of Kvasir to the best peer of the same precision, by number of streams.
_AIMS = {
    "bfloat16": {1: 1.0, 4: 1.2, 16: 1.5, 64: 1.5},
    "int8": {1: 1.0, 4: 1.1, 16: 1.1, 64: 1.3},
    "float32": {1: 1.0, 4: 1.0, 16: 1.0, 64: 1.0},
}
_PROMPT_AIM = 1.0
_HTTP_AIM, _HTTP_AIM_STREAMS = 1.5, (16, 64)
# OutputConstraint ratio with both servers started without flags, by number of streams.
_DEFAULTS_AIMS = {1: 1.0, 16: 3.0, 64: 3.0}
_AIMS_HEAD = ("shape", "precision", "what", "streams", "context", "best peer", "ratio to it", "aim", "reached")
_WHAT = {"decode": "decoding", "prompt": "prompt", "http": "HTTP, streaming"}


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest peer of a cell: the smallest median ratio of Kvasir to a peer."""

    peer: str
    ratio: dict[str, Any]


def best(cell: Mapping[str, Any]) -> Best | None:
    """Return the fastest peer of a cell, or None if no peer has a sound figure."""
    measured = _sound(cell)
    if not measured:
        return None
    name = min(measured, key=lambda name: measured[name]["ratio"]["median"])
    return Best(name, measured[name]["ratio"])


def _sound(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {name: figure for name, figure in cell["peers"].items() if is_sound(figure)}


def _reached(cell: Mapping[str, Any], ratio: float, wanted: float | None) -> str:
    """Return the cell that says if the aim is reached. The aim stays open if a figure of another peer was disturbed."""
    if wanted is None:
        return ""
    if ratio < wanted:
        return "**no**"
    disturbed = [name for name, figure in cell["peers"].items() if "ratio" in figure and not is_sound(figure)]
    return f"open: {', '.join(disturbed)} †" if disturbed else "yes"


def aim(cell: Mapping[str, Any]) -> float | None:
    """Return the wanted ratio of Kvasir to the best peer, or None without an aim."""
    if cell["precision"] == DEFAULTS:
        return _DEFAULTS_AIMS.get(cell["streams"])
    if cell["kind"] == "prompt":
        return _PROMPT_AIM
    if cell["kind"] == "http":
        return _HTTP_AIM if cell["streams"] in _HTTP_AIM_STREAMS else None
    aims: float = _AIMS[cell["precision"]][cell["streams"]]
    return aims


def section(result: dict[str, Any], picture: str) -> str:
    """Return the section on the comparison. `picture` is the file name of its picture."""
    settings = result["settings"]
    sizes = "; ".join(f"{name}: {_shape(sizes)}" for name, sizes in result["shapes"].items())
    return f"""## Comparison with other engines

{command(result)}

Every engine runs the same random weights, exported to its format (Llama architecture, tied embeddings;
{sizes}). Each uses {settings["threads"]} threads. Prompts are random tokens, sampling is greedy, and end-of-text tokens
are ignored. Kvasir and a peer are measured as a pair: one right after the other, with the same prompts. A ratio is
Kvasir's speed divided by the peer's within a pair, as the median over up to {settings["rounds"]} pairs.
Kvasir's KV-cache is bfloat16. With float32 weights it is float16 (`--kv-cache-dtype float16`), as it is for llama.cpp
and OpenVINO.

- Decoding counts the tokens after the last sequence had its first token. The context is that of the middle of the
  completion.
- Prompt counts the prompt's tokens until the first sampled token.
- HTTP counts all tokens of completions, from the first request to the end of the last response.

An empty cell was not measured. A dagger (†) replaces a figure that was disturbed in every attempt. A pair is disturbed
if other processes kept more than {QUIET_CORES} of a core busy. It is also disturbed if the processors gave less
than {STEADY_SHARE} of their usual speed, measured by a matrix product before, between and after the two sides.

{table(("", "versions", "as"), list(_peers(result)))}
Kvasir compared with the fastest peer of the same precision:

{table(_AIMS_HEAD, _aims(result))}
![tokens/s of each engine over the number of streams]({picture})

{_details(result)}"""


def defaults_section(result: dict[str, Any]) -> str:
    """Return the section on both servers without flags: only checkpoint, address and port are given."""
    sizes = "; ".join(f"{name}: {_shape(sizes)}" for name, sizes in result["shapes"].items())
    rows = []
    for cell in result["cells"]:
        wanted = aim(cell)
        for name, figure in _sound(cell).items():
            ratio = figure["ratio"]
            rows.append([cell["shape"], str(cell["streams"]), name, _ours(cell)])
            rows[-1] += [spread(figure["theirs"]["tokens_per_second"], ".1f"), spread(ratio, ".2f")]
            rows[-1] += ["" if wanted is None else f"{wanted:.1f}", _reached(cell, ratio["median"], wanted)]
    head = ("shape", "streams", "peer", "Kvasir, tokens/s", "peer, tokens/s", "ratio", "aim", "reached")
    return f"""## Without flags

{command(result)}

Each server is started with a bfloat16 file of the same random weights ({sizes}) and no other
settings. It chooses dtype, threads, cache size and batch size itself. llama-server runs four sequences at a time by
default, and further requests wait. Streaming clients, pairs and aims are those of the next section. There,
llama-server has a slot for every stream.

{table(head, rows)}
{_latencies(result["cells"])}"""


def _shape(sizes: Mapping[str, int]) -> str:
    heads = f"{sizes['num_heads']}/{sizes['num_kv_heads']} heads"
    return (
        f"{sizes['num_layers']} layers, width {sizes['hidden_size']}, {heads}, MLP {sizes['mlp_size']}, "
        f"vocabulary {sizes['vocab_size']:,}"
    )


def _peers(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, peer in result["peers"].items():
        note = peer["note"] if peer["unavailable"] is None else f"**not available here:** {peer['unavailable']}"
        yield [name, ", ".join(peer["pins"]), _in_a_cell(note)]


def _aims(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for cell in result["cells"]:
        found, wanted = best(cell), aim(cell)
        if found is not None:
            reached = _reached(cell, found.ratio["median"], wanted)
            wanted_text = "" if wanted is None else f"{wanted:.1f}"
            rows.append([*_cell(cell), found.peer, spread(found.ratio, ".2f"), wanted_text, reached])
    return rows


def _cell(cell: Mapping[str, Any]) -> list[str]:
    return [
        cell["shape"],
        cell["precision"],
        _WHAT[cell["kind"]],
        str(cell["streams"]),
        str(cell["context_length"] if cell["kind"] != "prompt" else cell["prompt_tokens"]),
    ]


def _details(result: Mapping[str, Any]) -> str:
    """Return a table for each kind of cell, with a column for each peer."""
    parts = []
    for kind, title in _WHAT.items():
        cells = [cell for cell in result["cells"] if cell["kind"] == kind and best(cell) is not None]
        if not cells:
            continue
        names = list(dict.fromkeys(name for cell in cells for name in cell["peers"]))
        head = ["shape", "precision", "streams", "context", "Kvasir, tokens/s"]
        head += [f"{name}, tokens/s; ratio" for name in names]
        rows = [
            [*_without_kind(_cell(cell)), _ours(cell), *(_figure(cell["peers"].get(name)) for name in names)]
            for cell in cells
        ]
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n{table(head, rows)}")
        if kind == "http":
            parts.append(_latencies(cells))
    failed = list(_failures(result))
    if failed:
        parts.append(f"Failures:\n\n{table(('peer', 'cells', 'reason'), failed)}")
    return "\n".join(parts)


def _without_kind(columns: Sequence[str]) -> list[str]:
    return [columns[0], columns[1], *columns[3:]]


def _ours(cell: Mapping[str, Any]) -> str:
    values = [value for figure in _sound(cell).values() for value in figure["ours"]["tokens_per_second"]["values"]]
    form = ".0f" if max(values) >= 100 else ".1f"
    return spread({"median": statistics.median(values), "min": min(values), "max": max(values)}, form)


def _figure(figure: Mapping[str, Any] | None) -> str:
    if figure is None or not is_sound(figure):
        return "†" if figure is not None and "ratio" in figure else ""
    return f"{figure['theirs']['tokens_per_second']['median']:.0f}; {spread(figure['ratio'], '.2f')}"


def _latencies(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for cell in cells:
        for name, figure in _sound(cell).items():
            ours, theirs = (
                " / ".join(f"{figure[side][f'ttft_{p}_ms']['median']:.0f}" for p in ("p50", "p99"))
                for side in ("ours", "theirs")
            )
            shares = Spread.of_ratios(*(figure[side]["ttft_p99_ms"]["values"] for side in ("ours", "theirs")))
            cpu = f"{100 * figure['ours']['client_cpu_share']['median']:.0f} %"
            rows.append([cell["shape"], cell["precision"], str(cell["streams"]), name, ours, theirs])
            rows[-1] += [f"{shares.median:.2f}", cpu]
    head = (
        "shape",
        "precision",
        "streams",
        "peer",
        "Kvasir, TTFT p50 / p99 ms",
        "peer, TTFT p50 / p99 ms",
        "p99 ratio",
        "client CPU, % of a core",
    )
    return table(head, rows)


def _failures(result: Mapping[str, Any]) -> Iterator[list[str]]:
    reasons: dict[tuple[str, str], int] = {}
    for cell in result["cells"]:
        for name, figure in cell["peers"].items():
            if "error" in figure:
                reasons[name, figure["error"]] = reasons.get((name, figure["error"]), 0) + 1
    for (name, reason), count in reasons.items():
        yield [name, str(count), _in_a_cell(reason)]


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
