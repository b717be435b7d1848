"""Section of docs/performance.md on latency under mixed load: tables of `loadtest.scenarios.bench_latency`."""

from typing import Any

from loadtest.docgen.page_text import command, spread, table


def section(result: dict[str, Any], picture: str) -> str:
    """Return the section on mixed load. `picture` is the file name of its picture."""
    short, long = result["short"], result["long"]
    return f"""## Latency under mixed load

{command(result)}

The model has random weights of shape {result["shape"]} and a context of 8,192 tokens.

**Short prompt.** A prompt of {short["prompt_tokens"]} tokens arrives while {short["streams"]} streams decode. Its first
token comes after {spread(short["steps"], ".0f")} engine steps (median; minimum and maximum in brackets). These are the
rest of the running step and the step with the prompt. Steps that pass while HTTP reads the request and sends the token
count too. The TTFT is {spread(short["ttft_ms"], ".1f")} ms. The streams' median ITL before the arrival was
{short["itl_p50_ms_before"]:.1f} ms.

**Long prompt.** A prompt of {long["prompt_tokens"]:,} tokens arrives while {long["streams"]} streams decode. Its
prefill is computed in chunks, in the same steps as the streams' tokens. Larger chunks finish the prompt sooner and slow
the streams more. `--max-batched-tokens` limits the tokens of a step. `--prompt-slowdown` limits a step with a chunk to
a multiple of the recently measured time of a step without it. The table has the 99th percentile of the streams' ITL
right before the prompt arrived ("before") and from then until its first token ("during"):

{table(_HEAD, [_row(point) for point in long["points"]])}
![slowdown of the streams by a long prompt, over the prompt's TTFT]({picture})
"""


_HEAD = (
    "`--max-batched-tokens`",
    "`--prompt-slowdown`",
    "streams' ITL p99 before, ms",
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
