"""The part of docs/performance.md on who waits for whom: tables of `loadtest.bench_latency`."""

from typing import Any

from loadtest.page_text import command, spread, table


def section(result: dict[str, Any], picture: str) -> str:
    """The section, with its picture's name."""
    short, long = result["short"], result["long"]
    return f"""## Beside each other

{command(result)}

Random weights of shape {result["shape"]}, a context of 8,192. **A short prompt**, of {short["prompt_tokens"]} tokens,
that arrives while {short["streams"]} others decode has its first token after {spread(short["steps"], ".0f")} steps of
the engine (median; smallest and largest in brackets): the rest of the step under way, its own, and what passes while
it is read and its token carried out. That is
{spread(short["ttft_ms"], ".1f")} ms, where the others' tokens were {short["itl_p50_ms_before"]:.1f} ms apart.

**A long prompt**, of {long["prompt_tokens"]:,} tokens, that arrives while {long["streams"]} others decode is computed
in chunks, beside their tokens. With larger chunks it is done sooner, and the others' tokens are further apart
meanwhile. `--max-batched-tokens` bounds a step; `--prompt-slowdown` bounds a prompt's part of it by how long the
others' would take alone, as was measured of late. The 99th percentile of the others' gaps, right before the prompt
came and until its first token:

{table(_HEAD, [_row(point) for point in long["points"]])}
![what a long prompt costs the others over how long it takes]({picture})
"""


_HEAD = (
    "`--max-batched-tokens`",
    "`--prompt-slowdown`",
    "others' ITL p99 before, ms",
    "during, ms",
    "ratio",
    "TTFT of the prompt, ms",
)


def _row(point: dict[str, Any]) -> list[str]:
    return [
        str(point["max_batched_tokens"]),
        str(point["prompt_slowdown"] or "inf"),
        spread(point["itl_p99_ms_before"], ".1f"),
        spread(point["itl_p99_ms_during"], ".1f"),
        spread(point["itl_p99_ratio"], ".2f"),
        spread(point["ttft_ms"], ".0f"),
    ]
