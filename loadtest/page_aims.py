"""The part of docs/performance.md on what is aimed at beside promises and other engines' speed, reached or not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.bench_peers_cells import is_sound
from loadtest.page_scaling import LARGE_BYTES, MEMORY_AIM, START_AIM
from loadtest.page_text import spread, table
from loadtest.spread import Spread

HTTP_RATIO = 0.95
STREAMS = (16, 64)
CPU_MICROSECONDS_PER_TOKEN = 30.0
SHORT_PROMPT_STEPS = 2.0
ITL_RATIO = 2.0
BANDWIDTH_SHARE = 0.8
BANDWIDTH_BATCH, BANDWIDTH_CONTEXT = 16, 512  # and more
TTFT_RATIO = 0.5  # of our 99th percentile to another server's


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure and how far it ought to be."""

    figure: str
    wanted: str
    measured: str
    is_reached: bool


def section(results: Mapping[str, dict[str, Any]]) -> str:
    """The table. What is not reached has its cause and the next idea in the log."""
    rows = [[aim.figure, aim.wanted, aim.measured, "yes" if aim.is_reached else "**no**"] for aim in aims(results)]
    return f"""Beside these, and beside [other engines' speed](#beside-other-engines), it is aimed at what follows; why
something falls short, and what would be next, is in the [log](performance-log.md).

{table(("", "aim", "measured", "reached"), rows)}"""


def aims(results: Mapping[str, dict[str, Any]]) -> Iterator[Aim]:
    """All of them."""
    yield from _way_to_the_client(results["service"]["levels"], results["frontend"]["levels"])
    yield from _beside_each_other(results["latency"])
    yield from _first_tokens(results["peers"]["cells"])
    yield from _scaling(results["scaling"])
    yield from _attention(results["kernels"]["rows"])


def _way_to_the_client(service: Sequence[dict[str, Any]], frontend: Sequence[dict[str, Any]]) -> Iterator[Aim]:
    for level in service:
        if level["streams"] in STREAMS:
            ratio = level["ratio"]
            figure = f"HTTP throughput at {level['streams']} streams, of the engine's"
            yield Aim(figure, f"at least {HTTP_RATIO:g}", spread(ratio, ".2f"), ratio["median"] >= HTTP_RATIO)
    for level in frontend:
        if level["step_ms"] and level["num_streams"] in STREAMS:
            cost, num_streams = level["cpu_us_per_token"], level["num_streams"]
            yield Aim(
                f"CPU of the API process for a token, {num_streams} streams, a step every {level['step_ms']:g} ms",
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
                f"What a prompt of {latency['long']['prompt_tokens']:,} tokens makes of the others' ITL p99",
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
            f"TTFT p99 at {' and '.join(map(str, STREAMS))} streams, of another server's",
            f"at most {TTFT_RATIO:g}",
            f"{min(shares):.2f} to {max(shares):.2f}; reached in {num_reached} of {len(shares)}",
            num_reached == len(shares),
        )


def _scaling(scaling: dict[str, Any]) -> Iterator[Aim]:
    furthest = max((point["ratio"] for point in scaling["kv_memory"]["points"]), key=lambda ratio: abs(ratio - 1))
    is_near = abs(furthest - 1) <= MEMORY_AIM
    yield Aim(
        "KV-cache's memory, of the formula's", f"within {MEMORY_AIM:.0%}", f"{furthest:.4f} at the furthest", is_near
    )
    large = [point for point in scaling["starts"]["points"] if point["bytes"] >= LARGE_BYTES]
    for point in large:
        for kind in ("warm", "cold"):
            ratio = point[kind]["ratio"]
            yield Aim(
                f"Start with {point['bytes'] / 1e9:.2g} GB of weights, files {kind}, of the time to read them",
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
            f"Decode attention from {BANDWIDTH_BATCH} streams x {BANDWIDTH_CONTEXT} tokens on, of what memory gives",
            f"at least {BANDWIDTH_SHARE:g}",
            f"{min(shares):.2f} to {max(shares):.2f}",
            min(shares) >= BANDWIDTH_SHARE,
        )
