"""Section of docs/performance.md on scaling: tables of `loadtest.scenarios.bench_scaling`."""

from collections.abc import Mapping
from typing import Any

from loadtest.docgen.page_text import command, model, spread, table

# Limits: start time relative to reading the checkpoint, and relative difference of memory from the formula.
START_AIM = 1.3
MEMORY_AIM = 0.03
LARGE_BYTES = 9e8  # bytes; the start aim holds for checkpoints of at least this size


def section(result: Mapping[str, Any], picture: str) -> str:
    """Return the section on scaling. `picture` is the file name of its picture."""
    return f"""## Scaling

{command(dict(result))}

{model(dict(result))}

![step time, KV-cache memory, TTFT and start time, each over its size]({picture})

{_steps(result["steps"])}
{_memory(result["kv_memory"])}
{_prefixes(result["prefixes"])}
{_starts(result["starts"])}"""


def _steps(steps: Mapping[str, Any]) -> str:
    rows = []
    for name, key in (("batch", "batch_size"), ("context", "context_length")):
        curve = steps[f"over_{name}"]
        law, line, points = curve["fits"]["power"], curve["fits"]["line"], curve["points"]
        other = "context_length" if key == "batch_size" else "batch_size"
        rows.append(
            [
                f"{name}, {points[0][key]} to {points[-1][key]}",
                f"{'context' if key == 'batch_size' else 'batch'} {points[0][other]}",
                f"{points[0]['step_ms']['median']:.2f} to {points[-1]['step_ms']['median']:.2f}",
                f"{law['exponent']:.2f}",
                f"{law['last']:.2f}",
                f"{line['fixed']:.2f} + {line['each']:.4f} n",
            ]
        )
    head = ("decode step over", "at", "ms", "exponent", "exponent, last two", "ms as a function of n")
    return f"""The exponent e is that of `c n^e`. The first exponent is a least-squares fit of the logarithms over all
points. The second is between the two largest points. Step time is a constant plus a linear part. The weights, for
example, are read once per step, whatever the batch.

{table(head, rows)}"""


def _memory(memory: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{point['tokens']:,}",
            f"{point['bytes'] / 1e6:.1f}",
            f"{point['formula'] / 1e6:.1f}",
            f"{point['ratio']:.4f}",
        ]
        for point in memory["points"]
    ]
    kept = all(abs(point["ratio"] - 1) <= MEMORY_AIM for point in memory["points"])
    each, exponent = memory["bytes_per_token"], memory["fits"]["power"]["exponent"]
    return f"""Resident memory of the KV-cache as tokens are written to it. The formula is L g (d_k + d_v) w =
{each:,} bytes per token. The exponent is {exponent:.3f}. Within {MEMORY_AIM:.0%} of the formula at every point:
{_word(kept)}.

{table(("tokens", "MB", "formula, MB", "ratio"), rows)}"""


def _prefixes(prefixes: Mapping[str, Any]) -> str:
    rows = [
        [
            str(point["shared_tokens"]),
            str(point["hits"]),
            str(point["rest_tokens"]),
            spread(point["ttft_ms"], ".1f"),
            spread(point["rest_alone_ms"], ".1f"),
            spread(point["ratio"], ".2f"),
        ]
        for point in prefixes["points"]
    ]
    head = ("shared tokens", "cached tokens", "other tokens", "TTFT ms", "TTFT ms, other tokens alone", "ratio")
    line = prefixes["fits"]["line"]
    return f"""Prefix cache: a prompt of {prefixes["prompt_tokens"]} tokens begins with the shared tokens of an earlier
prompt. It is measured in turn with an unshared prompt that is as long as its other tokens. The TTFT of the first is
{line["fixed"]:.1f} ms plus {line["each"]:.3f} ms for each token that is not shared. The ratio exceeds 1 because the
other tokens also attend to the shared ones.

{table(head, rows)}"""


def _starts(starts: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{point['bytes'] / 1e6:.0f}",
            kind,
            spread(point[kind]["start_seconds"], ".2f"),
            spread(point[kind]["read_seconds"], ".3f"),
            spread(point[kind]["ratio"], ".1f"),
        ]
        for kind in ("warm", "cold")
        for point in starts["points"]
    ]
    laws = [(kind, starts[kind]["start"]["line"], starts[kind]["read"]["line"]) for kind in ("warm", "cold")]
    lines = [
        f"With {kind} files a start takes {start['fixed']:.2f} s plus {start['each']:.2f} s per GB; "
        f"a read takes {read['each']:.2f} s per GB."
        for kind, start, read in laws
    ]
    large = [point for point in starts["points"] if point["bytes"] >= LARGE_BYTES]
    kept = all(point[kind]["ratio"]["median"] <= START_AIM for point in large for kind in ("warm", "cold"))
    aim = f" The largest checkpoint starts within {START_AIM} times its read: {_word(kept)}." if large else ""
    head = ("MB of weights", "files", "start to first token, s", "read, s", "ratio")
    return f"""Time of `kvasir serve` from the start of the process to the first token, compared with one read of the
weight files into a buffer of 16 MiB. Warm: the files are in the page cache. Cold: the kernel was asked to drop them
from the page cache, but the host of this virtual machine may have kept them. {" ".join(lines)}{aim}

{table(head, rows)}"""


def _word(kept: bool) -> str:
    return "yes" if kept else "**no**"
