"""Benchmark of Kvasir's engine and service against other engines: same random weights, threads and work, in one run.

    python -m loadtest.peers.bench_peers --out docs/results/peers.json

Kvasir and a peer are measured as a pair, one right after the other, and a ratio is taken within a pair. Measured pairs
are stored: the same command continues an interrupted run and repeats disturbed pairs. Run it on a quiet machine.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from loadtest.measurement.benchmark_program import QUIET_CORES, ForeignWork, MeasurementFailed, run_program, show
from loadtest.measurement.figures import ratio_spread, spread
from loadtest.measurement.model_shapes import SHAPE_SIZES
from loadtest.measurement.roofline import Roofline
from loadtest.peers import engines
from loadtest.peers.engines import OURS, PEERS, Cell, DriverProcess, Peer, PeerFiles, PeerServer, install

# A pair is disturbed if other processes used more cores, or if a processor probe was below this share of the usual.
STEADY_SHARE: Final = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPair:
    """Figures of Kvasir and a peer engine in one cell, measured one after the other, or the error of either engine.

    ours, theirs: figures by name; "tokens_per_second" is compared.
    gflops: speed of all processors, measured before, between and after the two engines.
    """

    cell: str
    peer: str
    round: int
    ours: dict[str, float] = field(default_factory=dict)
    theirs: dict[str, float] = field(default_factory=dict)
    other_work_cores: float = 0.0
    gflops: list[float] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


class PairStore:
    """Append-only file of measured pairs, from which an interrupted comparison continues. Skips an incomplete line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        self.pairs = [ComparedPair(**json.loads(line)) for line in lines]

    def add(self, pair: ComparedPair) -> None:
        """Store a measured pair, in memory and in the file."""
        self.pairs.append(pair)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(pair)) + "\n")

    def has(self, cell: Cell, peer: str, number: int) -> bool:
        """Return True if the file has an undisturbed pair of this cell, peer and round number."""
        return any(
            (pair.cell, pair.peer, pair.round, pair.error) == (cell.key, peer, number, None)
            and is_quiet([pair.other_work_cores], [self._speed_share(pair)])
            for pair in self.pairs
        )

    def summarize(self, cells: Sequence[Cell], peers: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield a JSON-ready row for each cell, with the figures of each peer, or with the last error of a peer.

        If a pair was measured several times, the least disturbed measurement counts.
        """
        for cell in cells:
            found = {peer: [p for p in self.pairs if (p.cell, p.peer) == (cell.key, peer)] for peer in peers}
            rows = {peer: self._summary(pairs) for peer, pairs in found.items() if pairs}
            yield {**asdict(cell), "context_length": cell.context_length, "peers": rows}

    def _speed_share(self, pair: ComparedPair) -> float:
        """Return a pair's lowest processor speed, relative to the median of all measured speeds; 1 without speeds."""
        probes = [probe for each in self.pairs for probe in each.gflops]
        return min(pair.gflops) / statistics.median(probes) if pair.gflops else 1.0

    def _summary(self, pairs: Sequence[ComparedPair]) -> dict[str, Any]:
        measured = [pair for pair in pairs if pair.error is None]
        if not measured:
            return {"error": pairs[-1].error}
        measured.sort(key=lambda pair: (self._speed_share(pair) < STEADY_SHARE, pair.other_work_cores), reverse=True)
        best = {pair.round: pair for pair in measured}
        chosen = [best[number] for number in sorted(best)]
        ours, theirs = [pair.ours for pair in chosen], [pair.theirs for pair in chosen]
        return {
            "ours": _spreads(ours),
            "theirs": _spreads(theirs),
            "ratio": ratio_spread(*([figures["tokens_per_second"] for figures in side] for side in (ours, theirs))),
            "other_work_cores": [pair.other_work_cores for pair in chosen],
            "processors_share": [round(self._speed_share(pair), 2) for pair in chosen],
        }


def _spreads(figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    names = [name for name in figures[0] if all(name in figure for figure in figures)]
    return {name: spread(figure[name] for figure in figures) for name in names}


def is_quiet(other_work_cores: Sequence[float], processors_share: Sequence[float]) -> bool:
    """Return True if measurements were not disturbed by other processes or by slow processors."""
    return max(other_work_cores) <= QUIET_CORES and min(processors_share) >= STEADY_SHARE


def is_sound(figure: Mapping[str, Any]) -> bool:
    """Return True if a peer's figures in a cell have no error, and were measured on a quiet machine (`is_quiet`)."""
    return "ratio" in figure and is_quiet(figure["other_work_cores"], figure["processors_share"])


class Comparison:
    """Runner of the comparison: starts the engines that are needed, measures pairs, and stops the engines."""

    def __init__(self, files: PeerFiles, threads: int, kept: PairStore) -> None:
        self._files, self._threads, self._kept = files, threads, kept
        # Two processors of a virtual machine may at times be two threads of one core of the host, so each pair is
        # surrounded by probes of their speed: a product of matrices that fit into the caches.
        torch.set_num_threads(threads)
        self._processors = Roofline("bfloat16", "cpu", read_bytes=4096, sides=(1024,))
        self._running: dict[tuple[str, bool], DriverProcess | PeerServer] = {}  # by name, and True for a server
        self._warm: set[tuple[str, str, int]] = set()

    def run(self, cells: Sequence[Cell], peers: Sequence[Peer], num_rounds: int) -> None:
        """Measure the pairs of all cells, peers and rounds that are not stored yet, and stop the engines at the end."""
        for _, group in itertools.groupby(cells, key=lambda cell: (cell.shape, cell.precision)):
            try:
                for number, cell, peer in itertools.product(range(num_rounds), list(group), peers):
                    if peer.supports(cell) and not self._kept.has(cell, peer.name, number):
                        self._kept.add(self._pair(cell, peer, number))
            finally:
                self._stop_all()

    def _pair(self, cell: Cell, peer: Peer, number: int) -> ComparedPair:
        """Measure Kvasir and a peer with the same new prompts. The engine that goes first alternates between rounds."""
        prompts = self._prompts(cell, f"{peer.name} {number}")
        pair = partial(ComparedPair, cell=cell.key, peer=peer.name, round=number)
        try:
            for side in (OURS, peer):
                side.write_model(self._files, cell)
                self._start(cell, side)
            foreign, began = ForeignWork(), time.monotonic()
            gflops, figures = [self._gflops()], {}
            for side in (OURS, peer) if number % 2 == 0 else (peer, OURS):
                show(f"{cell.key} {side.name}")
                figures[side.name] = self._figures(cell, side, prompts)
                gflops.append(self._gflops())
        except MeasurementFailed as error:
            lines = str(error).splitlines()
            return pair(error=": ".join(dict.fromkeys((lines[0], lines[-1]))))
        return pair(
            ours=figures[OURS.name],
            theirs=figures[peer.name],
            other_work_cores=round(foreign.cores(), 2),
            gflops=gflops,
            seconds=round(time.monotonic() - began, 1),
        )

    def _gflops(self) -> float:
        return round(self._processors.probe().flops_per_second / 1e9, 1)

    def _start(self, cell: Cell, side: Peer) -> None:
        """Start an engine unless it runs, and warm it up, because the first run with a number of streams is slower."""
        key = (side.name, cell.kind == "http")
        if key not in self._running:
            if cell.kind == "http":
                assert side.server is not None, "the peer supports this cell"
                self._running[key] = PeerServer(side.server(self._files, cell, self._threads))
            else:
                self._running[key] = DriverProcess(side.engine(self._files, cell, self._threads), side.variables)
        warm = (side.name, cell.kind, cell.streams)
        if warm not in self._warm:
            self._figures(replace(cell, output_tokens=2), side, self._prompts(cell, "warm-up"))
            self._warm.add(warm)

    def _figures(self, cell: Cell, side: Peer, prompts: list[list[int]]) -> dict[str, Any]:
        """Return one engine's figures for these prompts. Stop the engine if the measurement fails."""
        key = (side.name, cell.kind == "http")
        try:
            return self._running[key].measure(cell, prompts)
        except MeasurementFailed:
            self._running.pop(key).close()
            self._warm.clear()
            raise

    def _prompts(self, cell: Cell, pair: str) -> list[list[int]]:
        return engines.random_prompts(cell, SHAPE_SIZES[cell.shape]["vocab_size"], f"{cell.key} {pair}")

    def _stop_all(self) -> None:
        while self._running:
            self._running.popitem()[1].close()
        self._warm.clear()


def _pins(environment: str) -> list[str]:
    texts = (path.read_text() for path in sorted(engines.PINS.glob(f"{environment}*.txt")))
    return [line for text in texts for line in text.splitlines() if not line.startswith("#")]


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Install the peers, compare them with Kvasir, and return all figures; if interrupted, the figures so far.

    A peer that cannot be installed is listed as unavailable. Raises ValueError for less than one round or thread.
    """
    if min(arguments.rounds, arguments.threads) < 1:
        raise ValueError("--rounds and --threads must be at least 1")
    files, peers = PeerFiles(arguments.directory), [peer for peer in PEERS if peer.name in arguments.peers]
    unavailable = {}
    for peer in peers:
        try:
            install(files, peer.environment)
        except MeasurementFailed as error:
            unavailable[peer.name] = str(error)
    cells = [
        cell
        for cell in engines.make_cells(arguments.shapes, arguments.precisions, arguments.kinds)
        if cell.streams in arguments.streams and cell.context_length in arguments.contexts
    ]
    kept = PairStore(files.directory / "progress.jsonl")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_interrupted = False
    try:
        available = [peer for peer in peers if peer.name not in unavailable]
        Comparison(files, arguments.threads, kept).run(cells, available, arguments.rounds)
    except KeyboardInterrupt:
        print("interrupted; repeat the command to continue", file=sys.stderr)
        is_interrupted = True
    return {
        "kind": "peers",
        "interrupted": is_interrupted,
        "took_seconds": round(sum(pair.seconds for pair in kept.pairs), 1),
        "settings": {"threads": arguments.threads, "rounds": arguments.rounds},
        "shapes": {shape: SHAPE_SIZES[shape] for shape in arguments.shapes},
        "peers": {
            peer.name: {"note": peer.note, "pins": _pins(peer.environment), "unavailable": unavailable.get(peer.name)}
            for peer in peers
        },
        "cells": list(kept.summarize(cells, arguments.peers)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 0; 1 after a failure, or after an interruption, when it writes the figures so far."""
    names = [peer.name for peer in PEERS]
    options = {
        "shapes": (["qwen3-0.6b", "llama-3.2-1b"], "model shapes", SHAPE_SIZES),
        "precisions": (
            ["bfloat16", "int8"],
            f"precisions; {' and '.join(engines.DEFAULTS)}: servers without flags",
            engines.PRECISIONS,
        ),
        "streams": (list(engines.STREAMS), "measure only these streams", engines.STREAMS),
        "contexts": (list(engines.CONTEXTS), "measure only these contexts", engines.CONTEXTS),
        "kinds": (list(engines.KINDS), "kinds of work", engines.KINDS),
        "peers": (names, "compared engines", names),
        "rounds": (3, "measurements of each pair"),
        "threads": (os.cpu_count() or 1, "CPU threads per engine"),
        "directory": (engines.ROOT / ".venv-peers", "directory of environments, models and stored pairs"),
    }
    return run_program("loadtest.peers.bench_peers", __doc__, options, _measure, argv)


if __name__ == "__main__":
    raise SystemExit(main())
