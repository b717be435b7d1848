"""The part of docs/performance.md on how the service scales: tables of `loadtest.bench_scaling`."""

from collections.abc import Mapping
from typing import Any

from loadtest.page_text import command, model, spread, table

# A start may take so many times as long as to read the checkpoint; memory may differ from the formula by so much.
START_AIM = 1.3
MEMORY_AIM = 0.03
LARGE_BYTES = 9e8  # bytes of a checkpoint that is held to it


def section(result: Mapping[str, Any], picture: str) -> str:
    """The section, with its picture's name."""
    return f"""## How it scales

{command(dict(result))}

{model(dict(result))}

![step time, KV memory, first token and start, each over its size]({picture})

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
    head = ("a decode step over", "at", "ms", "exponent", "of the last two", "ms of n")
    return f"""An exponent e is that of `c n^e`, by least squares in logarithms over all points, then between the two
largest: a step has a part that no size changes (the weights are read once, whatever the batch), so that it grows as a
line does.

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
    return f"""The KV-cache's resident memory, as tokens are written to it, beside
L g (d_k + d_v) w = {each:,} bytes a token: exponent {exponent:.3f}; within {MEMORY_AIM:.0%} of it at every point:
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
    head = ("shared tokens", "found", "the rest", "TTFT ms", "the rest alone, TTFT ms", "ratio")
    line = prefixes["fits"]["line"]
    return f"""A prompt of {prefixes["prompt_tokens"]} tokens, of which an earlier one had the beginning, and in turn a
prompt that nobody had, as long as the rest: {line["fixed"]:.1f} ms and {line["each"]:.3f} ms for each token that is not
shared. The rest also attends to what is shared, which the other prompt does not have.

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
        f"{kind}: {start['fixed']:.2f} s and {start['each']:.2f} s a GB, where a read takes {read['each']:.2f} s a GB"
        for kind, start, read in laws
    ]
    large = [point for point in starts["points"] if point["bytes"] >= LARGE_BYTES]
    kept = all(point[kind]["ratio"]["median"] <= START_AIM for point in large for kind in ("warm", "cold"))
    aim = f" At most {START_AIM} times the read, of the largest: {_word(kept)}." if large else ""
    head = ("MB of weights", "files", "start to first token, s", "read, s", "ratio")
    return f"""`kvasir serve`, from its program's start to its first token, beside one read of its weights' files into a
buffer of 16 MiB: warm, the kernel has them in memory; cold, it was told to forget them (the machine below ours may have
kept them). {"; ".join(lines)}.{aim}

{table(head, rows)}"""


def _word(kept: bool) -> str:
    return "yes" if kept else "**no**"
