"""Section of docs/performance.md on the decode-attention kernel: table of `loadtest.inprocess.bench_kernels`."""

from typing import Any

from loadtest.docgen.page_text import command, spread, table

_HEAD = ("case", "µs per layer", "GB/s", "memory, GB/s", "share of memory GB/s", "PyTorch, µs", "speedup over PyTorch")


def section(result: dict[str, Any]) -> str:
    """Return the section on the decode-attention kernel."""
    return f"""## Decode attention kernel

{command(result)}

Attention of one decode step: B sequences, T tokens of context. The KV-cache blocks are scattered over a buffer much
larger than the processor's caches. The kernels are those of `model/kernels` (level {result["level"]}), on
{result["threads"]} threads. A plain read of memory and PyTorch's scaled dot-product attention over the same KV-cache
are measured in turn with them, on the same number of threads.

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
