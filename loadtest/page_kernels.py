"""The part of docs/performance.md on decode attention alone: `python -m loadtest.bench_kernels`."""

from typing import Any

from loadtest.page_text import command, spread, table

_HEAD = ("case", "µs a layer", "GB/s", "memory, GB/s", "of the memory's", "PyTorch's µs", "times PyTorch's speed")


def section(result: dict[str, Any]) -> str:
    """The kernel's section."""
    return f"""## Decode attention, alone

{command(result)}

One token each of so many sequences (B) at so many tokens of context (T), over blocks that lie scattered in a cache far
larger than the processor's, by the kernels of `model/kernels` (level {result["level"]}) on {result["threads"]} threads;
beside it a plain read of memory on as many threads, and PyTorch's scaled dot product over the same cache, in turns.

{table(_HEAD, [_row(row) for row in result["rows"]])}"""


def _row(row: dict[str, Any]) -> list[str]:
    return [
        row["case"],
        spread(row["native_us"], ".0f"),
        f"{row['gb_per_second']['median']:.1f}",
        f"{row['memory_gb_per_second']['median']:.1f}",
        spread(row["share_of_memory"], ".2f"),
        f"{row['sdpa_us']['median']:.0f}",
        spread(row["times_sdpa"], ".1f"),
    ]
