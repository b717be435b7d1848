"""The part of docs/performance.md on the engine in-process: tables of `kvasir bench`."""

from typing import Any

from loadtest.page_text import command, model, spread, table


def section(result: dict[str, Any], picture: str) -> str:
    """The engine's section, with its picture's name."""
    settings, machine = result["settings"], result["roofline"]
    formulas = machine["formulas"]
    return f"""## The engine, in-process

{command(result)}

{model(result)}

So many sequences, no two of which share a block of the KV-cache, each at its context, over {settings["steps"]} steps in
which all of them get a token, greedily. The roofline is what no engine can beat: bytes and FLOPs of a step by formula
(`loadtest/step_work.py`), at the {spread(machine["gb_per_second"], ".0f")} GB/s and {spread(machine["gflops"], ".0f")}
GFLOP/s of {machine["weights"]} that a probe of the same rounds found on as many threads. A step moves
`{formulas["decode_bytes"]}` bytes and computes `{formulas["decode_flops"]}` FLOPs: W numbers in matrices of w bytes
each, B sequences of C tokens, k bytes of KV-cache a token, A numbers of all layers' query heads.

{table(_DECODE_HEAD, [_decode_row(point) for point in result["decode"]])}
![milliseconds a step over sequences, and the roofline]({picture})

A prompt that nobody had before, alone in the engine, until its first token:

{table(_PROMPT_HEAD, [_prompt_row(point) for point in result["prompts"]])}"""


_DECODE_HEAD = ("sequences", "context", "ms a step", "tokens/s", "MB", "GFLOP", "of the roofline")
_PROMPT_HEAD = ("prompt tokens", "TTFT ms", "tokens/s", "GFLOP", "of the roofline")


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
