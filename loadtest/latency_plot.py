"""The picture of a token budget's trade-off: what a long prompt costs those who stream, and how long it takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from loadtest.performance_plot import digest

_DPI = 80
# What an arrival may do to the others' gaps.
MOST_RATIO = 2.0


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Gaps of the others over the budget, as ratios to what they were, and the prompt's time to first token."""
    budgets = result["long"]["budgets"]
    sizes = [point["max_batched_tokens"] for point in budgets]
    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    ratios = [point["itl_p99_ratio"] for point in budgets]
    medians = [ratio["median"] for ratio in ratios]
    bars = [[ratio["median"] - ratio["min"] for ratio in ratios], [ratio["max"] - ratio["median"] for ratio in ratios]]
    left.errorbar(sizes, medians, bars, fmt="o-", color="C0", capsize=3, label="others' ITL p99, ratio to before")
    left.axhline(MOST_RATIO, color="C0", linestyle=":")
    right.plot(sizes, [p["ttft_ms"]["median"] for p in budgets], "s--", color="C1", label="TTFT of the prompt")
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    left.set_xlabel("--max-batched-tokens")
    left.set_ylabel("others' ITL p99, ratio to before (dotted: 2)", color="C0")
    right.set_ylabel(f"ms to the first token of {result['long']['prompt_tokens']:,} tokens", color="C1")
    left.grid(visible=True, alpha=0.25)
    figure.savefig(path, dpi=_DPI, metadata={"Source": digest(result), "Software": None})
