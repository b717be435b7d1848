"""Section of docs/performance.md on the engine in-process: tables of `kvasir bench`."""

from typing import Any

from loadtest.docgen.page_text import command, model, spread, table


def section(result: dict[str, Any], picture: str) -> str:
    """Return the section on the engine. `picture` is the file name of its picture."""
    settings, machine = result["settings"], result["roofline"]
    formulas = machine["formulas"]
    return f"""## The engine, in-process

{command(result)}

{model(result)}

Decode: each sequence stands at the given context, and no two sequences share a KV-cache block. Figures cover
{settings["steps"]} steps. Each step samples one token per sequence, greedily.

The roofline is the least time a step can take on this machine. Bytes and FLOPs per step follow from a formula
(`loadtest/measurement/step_work.py`). A probe on the same number of threads, in the same rounds, measured
{spread(machine["gb_per_second"], ".0f")} GB/s and {spread(machine["gflops"], ".0f")} GFLOP/s of {machine["weights"]}. A
step moves `{formulas["decode_bytes"]}` bytes and computes `{formulas["decode_flops"]}` FLOPs. W is the number of
weights in matrices, of w bytes each. B is the number of sequences, of C tokens each. k is the KV-cache bytes per token.
A is the number of values in the query heads of all layers.

{table(_DECODE_HEAD, [_decode_row(point) for point in result["decode"]])}
![step time over the number of sequences, with the roofline]({picture})

Prefill: one prompt alone in the engine, without a cached prefix, until its first token:

{table(_PROMPT_HEAD, [_prompt_row(point) for point in result["prompts"]])}"""


_DECODE_HEAD = ("sequences", "context", "ms per step", "tokens/s", "MB", "GFLOP", "share of the roofline")
_PROMPT_HEAD = ("prompt tokens", "TTFT ms", "tokens/s", "GFLOP", "share of the roofline")


def _decode_row(point: dict[str, Any]) -> list[str]:
    return [
        str(point["batch_size"]),
        str(point["context_length"]),
        spread(point["step_ms"], ".2f"),
        spread(point["tokens_per_second"], ".0f"),
        f"{point['bytes'] / 1e6:.0f}",
        f"{point['flops'] / 1e9:.2f}",
        spread(point["of_the_roofline"], ".2f"),
    ]


def _prompt_row(point: dict[str, Any]) -> list[str]:
    return [
        str(point["prompt_tokens"]),
        spread(point["ttft_ms"], ".1f"),
        spread(point["tokens_per_second"], ".0f"),
        f"{point['flops'] / 1e9:.2f}",
        spread(point["of_the_roofline"], ".2f"),
    ]
