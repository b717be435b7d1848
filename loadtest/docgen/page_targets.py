"""Section of docs/performance.md on aims other than promises and speed relative to other engines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.docgen.page_scaling import LARGE_BYTES, MEMORY_AIM, START_AIM
from loadtest.docgen.page_text import spread, table
from loadtest.measurement.spread import Spread
from loadtest.peers.comparison_cells import is_sound

HTTP_RATIO = 0.95
STREAMS = (16, 64)
CPU_MICROSECONDS_PER_TOKEN = 30.0
SHORT_PROMPT_STEPS = 2.0
ITL_RATIO = 2.0
BANDWIDTH_SHARE = 0.8
BANDWIDTH_BATCH, BANDWIDTH_CONTEXT = 16, 512  # minimum values
TTFT_RATIO = 0.5  # Kvasir's 99th percentile relative to another server's


@dataclass(frozen=True, slots=True)
class Aim:
    """A measured figure and its aim."""

    figure: str
    wanted: str
    measured: str
    is_reached: bool


def section(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the table of aims. docs/performance-log.md has the cause of each missed aim and the next idea."""
    rows = [[aim.figure, aim.wanted, aim.measured, "yes" if aim.is_reached else "**no**"] for aim in aims(results)]
    return f"""The next table lists aims, which are not promises. The [log](performance-log.md) says why an aim is
missed and what to try next. Speed relative to [other engines](#comparison-with-other-engines) has its own aims.

{table(("", "aim", "measured", "reached"), rows)}"""


def aims(results: Mapping[str, dict[str, Any]]) -> Iterator[Aim]:
    """Yield every aim."""
    yield from _way_to_the_client(results["service"]["levels"], results["frontend"]["levels"])
    yield from _beside_each_other(results["latency"])
    yield from _first_tokens(results["peers"]["cells"])
    yield from _scaling(results["scaling"])
    yield from _attention(results["kernels"]["rows"])


def _way_to_the_client(service: Sequence[dict[str, Any]], frontend: Sequence[dict[str, Any]]) -> Iterator[Aim]:
    for level in service:
        if level["streams"] in STREAMS:
            ratio = level["ratio"]
            figure = f"HTTP throughput at {level['streams']} streams, relative to the engine"
            yield Aim(figure, f"at least {HTTP_RATIO:g}", spread(ratio, ".2f"), ratio["median"] >= HTTP_RATIO)
    for level in frontend:
        if level["step_ms"] and level["num_streams"] in STREAMS:
            cost, num_streams = level["cpu_us_per_token"], level["num_streams"]
            yield Aim(
                f"CPU of the API process per token, {num_streams} streams, a step every {level['step_ms']:g} ms",
                f"at most {CPU_MICROSECONDS_PER_TOKEN:g} µs",
                f"{spread(cost, '.0f')} µs",
                cost["median"] <= CPU_MICROSECONDS_PER_TOKEN,
            )


def _beside_each_other(latency: dict[str, Any]) -> Iterator[Aim]:
    steps = latency["short"]["steps"]
    yield Aim(
        f"First token of a short prompt while {latency['short']['streams']} streams decode",
        f"at most {SHORT_PROMPT_STEPS:g} steps",
        f"{spread(steps, '.0f')} steps",
        steps["median"] <= SHORT_PROMPT_STEPS,
    )
    for point in latency["long"]["points"]:
        if point["prompt_slowdown"] is not None:
            ratio = point["itl_p99_ratio"]
            yield Aim(
                f"Growth of the streams' ITL p99 by a prompt of {latency['long']['prompt_tokens']:,} tokens",
                f"at most {ITL_RATIO:g} times",
                spread(ratio, ".2f"),
                ratio["median"] <= ITL_RATIO,
            )


def _first_tokens(cells: Sequence[dict[str, Any]]) -> Iterator[Aim]:
    shares = [
        Spread.of_ratios(*(figure[side]["ttft_p99_ms"]["values"] for side in ("ours", "theirs"))).median
        for cell in cells
        if cell["kind"] == "http" and cell["streams"] in STREAMS
        for figure in cell["peers"].values()
        if is_sound(figure)
    ]
    if shares:
        num_reached = sum(share <= TTFT_RATIO for share in shares)
        yield Aim(
            f"TTFT p99 at {' and '.join(map(str, STREAMS))} streams, relative to another server",
            f"at most {TTFT_RATIO:g}",
            f"{min(shares):.2f} to {max(shares):.2f}; reached in {num_reached} of {len(shares)}",
            num_reached == len(shares),
        )


def _scaling(scaling: dict[str, Any]) -> Iterator[Aim]:
    furthest = max((point["ratio"] for point in scaling["kv_memory"]["points"]), key=lambda ratio: abs(ratio - 1))
    is_near = abs(furthest - 1) <= MEMORY_AIM
    yield Aim(
        "KV-cache memory, relative to the formula", f"within {MEMORY_AIM:.0%}", f"{furthest:.4f} at worst", is_near
    )
    large = [point for point in scaling["starts"]["points"] if point["bytes"] >= LARGE_BYTES]
    for point in large:
        for kind in ("warm", "cold"):
            ratio = point[kind]["ratio"]
            yield Aim(
                f"Start with {point['bytes'] / 1e9:.2g} GB of weights, files {kind}, relative to reading them",
                f"at most {START_AIM:g} times",
                spread(ratio, ".1f"),
                ratio["median"] <= START_AIM,
            )


def _attention(rows: Sequence[dict[str, Any]]) -> Iterator[Aim]:
    shares = [
        row["share_of_memory"]["median"]
        for row in rows
        if row["batch"] >= BANDWIDTH_BATCH and row["context"] >= BANDWIDTH_CONTEXT
    ]
    if shares:
        yield Aim(
            f"Decode attention from {BANDWIDTH_BATCH} streams x {BANDWIDTH_CONTEXT} tokens up, share of bandwidth",
            f"at least {BANDWIDTH_SHARE:g}",
            f"{min(shares):.2f} to {max(shares):.2f}",
            min(shares) >= BANDWIDTH_SHARE,
        )
