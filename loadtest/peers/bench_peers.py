"""Benchmark of Kvasir's engine and service against other engines: same random weights, threads and work, in one run.

    python -m loadtest.peers.bench_peers --out docs/results/peers.json

The benchmark installs each peer under .venv-peers and exports the model to its format, once. Then it measures pairs,
cell by cell, in rounds: Kvasir, a peer, Kvasir, the next peer. A ratio is taken within a pair.

Measured pairs are stored, so the same command continues an interrupted run. A peer that cannot be installed is
listed with the reason. Run it on a quiet machine.
"""

import argparse
import dataclasses
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtest.measurement.benchmark_program import MeasurementFailed, benchmark_parser, read_arguments, show
from loadtest.measurement.other_processes import ForeignWork
from loadtest.measurement.provenance import other_work, provenance, quiet_or_warned, tell
from loadtest.measurement.roofline import ProcessorProbe
from loadtest.measurement.shape_names import SHAPE_SIZES
from loadtest.peers.comparison_cells import (
    DEFAULTS,
    KINDS,
    PRECISIONS,
    QUIET_CORES,
    STEADY_SHARE,
    Cell,
    ComparedPair,
    PairStore,
    make_cells,
    random_prompts,
)
from loadtest.peers.engines import OURS, PEERS, PINS, ROOT, Peer, PeerFiles, install
from loadtest.peers.processes import DriverProcess, PeerServer

_AGREED = 16  # first tokens of a completion that are compared
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.25, 20.0  # of the wait for a quiet machine before each pair


class Comparison:
    """Runner of the comparison: starts the engines that are needed, measures pairs, and stops the engines."""

    def __init__(self, files: PeerFiles, threads: int, attempts: int, kept: PairStore) -> None:
        self._files, self._threads, self._attempts, self._kept = files, threads, attempts, kept
        self._probe = ProcessorProbe(threads)
        self._running: dict[tuple[str, bool], DriverProcess | PeerServer] = {}  # by name, and True for a server
        self._warm: set[tuple[str, str, int]] = set()

    def measure(self, cell: Cell, peer: Peer, number: int) -> None:
        """Measure one pair, unless it is stored."""
        if self._kept.has(cell, peer.name, number):
            return
        try:
            for side in (OURS, peer):
                side.write_model(self._files, cell)
                self._start(cell, side)
            for attempt in range(self._attempts):
                self._wait_for_quiet()
                self._kept.add(self._pair(cell, peer, number, attempt))
                if self._kept.has(cell, peer.name, number):
                    return
        except MeasurementFailed as error:
            lines = str(error).splitlines()
            reason = ": ".join(dict.fromkeys((lines[0], lines[-1])))
            self._kept.add(ComparedPair(cell=cell.key, peer=peer.name, round=number, error=reason))

    def _pair(self, cell: Cell, peer: Peer, number: int, attempt: int) -> ComparedPair:
        """Measure both sides with fresh prompts. The side that goes first alternates between rounds."""
        prompts = self._prompts(cell, f"{peer.name} {number} {attempt}")
        foreign, began = ForeignWork(), time.monotonic()
        gflops, figures = [self._probe.gflops()], {}
        for side in (OURS, peer) if number % 2 == 0 else (peer, OURS):
            show(f"{cell.key} {side.name}")
            figures[side.name] = self._figures(cell, side, prompts)
            gflops.append(self._probe.gflops())
        busy, took = round(foreign.cores(), 2), round(time.monotonic() - began, 1)
        ours, theirs = figures[OURS.name], figures[peer.name]
        pairs = zip(ours.pop("token_ids", [])[:_AGREED], theirs.pop("token_ids", [])[:_AGREED], strict=False)
        if agreements := [mine == other for mine, other in pairs]:
            theirs["first_tokens_alike"] = float([*agreements, False].index(False))
        return ComparedPair(
            cell=cell.key,
            peer=peer.name,
            round=number,
            ours=ours,
            theirs=theirs,
            other_work_cores=busy,
            gflops=[round(each, 1) for each in gflops],
            seconds=took,
        )

    def _wait_for_quiet(self) -> None:
        """Wait until no other process is busy and the processors have their usual speed, up to the patience."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            if (busy := other_work(_LOOK_SECONDS)) > QUIET_CORES:
                fault = f"{busy:.1f} cores are busy"
            elif (given := self._probe.gflops()) < STEADY_SHARE * self._kept.usual_gflops:
                fault = f"{given:.0f} of the usual {self._kept.usual_gflops:.0f} GFLOP/s"
            else:
                return
            if time.monotonic() >= deadline:
                show(f"on a busy machine: {fault}")
                return

    def _start(self, cell: Cell, side: Peer) -> None:
        """Start one side if it does not run, and warm it up for the cell: the first wave of a size is slower."""
        key = (side.name, cell.kind == "http")
        if key not in self._running:
            if cell.kind == "http":
                assert side.server is not None, "the peer supports this cell"
                self._running[key] = PeerServer(side.server(self._files, cell, self._threads))
            else:
                self._running[key] = DriverProcess(side.engine(self._files, cell, self._threads), side.variables)
        warm = (side.name, cell.kind, cell.streams)
        if warm not in self._warm:
            self._figures(dataclasses.replace(cell, output_tokens=2), side, self._prompts(cell, "warm-up"))
            self._warm.add(warm)

    def _figures(self, cell: Cell, side: Peer, prompts: list[list[int]]) -> dict[str, Any]:
        """Measure one side. An engine that fails is stopped."""
        key = (side.name, cell.kind == "http")
        try:
            return self._running[key].measure(cell, prompts)
        except MeasurementFailed:
            self._running.pop(key).close()
            self._warm.clear()
            raise

    def _prompts(self, cell: Cell, pair: str) -> list[list[int]]:
        """Return the prompts of a pair: the same for both sides, new for each pair, so that no prefix is cached."""
        seed = int.from_bytes(f"{cell.key} {pair}".encode(), "big")
        return random_prompts(cell, SHAPE_SIZES[cell.shape]["vocab_size"], seed)

    def stop_all(self) -> None:
        """Stop all engines: before another model or precision, and at the end."""
        while self._running:
            self._running.popitem()[1].close()
        self._warm.clear()


def compare(
    comparison: Comparison, rows: Sequence[tuple[Cell, Peer]], *, num_rounds: int, deadline_seconds: float
) -> bool:
    """Measure every pair. Return False if the deadline on the monotonic clock passed before."""
    for _, group in itertools.groupby(rows, key=lambda row: (row[0].shape, row[0].precision)):
        of_one_model = list(group)
        for number, (cell, peer) in itertools.product(range(num_rounds), of_one_model):
            if time.monotonic() > deadline_seconds:
                return False
            if peer.supports(cell):
                comparison.measure(cell, peer, number)
        comparison.stop_all()
    return True


def install_all(files: PeerFiles, peers: Sequence[Peer]) -> dict[str, str]:
    """Install missing environments. Return the reason of each peer that cannot be installed."""
    unavailable = {}
    for peer in peers:
        try:
            install(files, peer.environment)
        except MeasurementFailed as error:
            unavailable[peer.name] = str(error)
    return unavailable


def _pins(environment: str) -> list[str]:
    lines = [line for path in sorted(PINS.glob(f"{environment}*.txt")) for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = benchmark_parser(
        "loadtest.peers.bench_peers",
        "Compare Kvasir's engine and service with other engines on the same model, in one run.",
    )
    add = parser.add_argument
    names = [peer.name for peer in PEERS]
    add("--shapes", nargs="+", choices=sorted(SHAPE_SIZES), default=["S", "M"], help="model shapes (default: S M)")
    text = f"default: all except {DEFAULTS} (a bfloat16 file served without flags)"
    add("--precisions", nargs="+", choices=(*PRECISIONS, DEFAULTS), default=list(PRECISIONS), help=text)
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cells (default: all)")
    text = f"peers (default: all): {', '.join(names)}"
    add("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=text)
    for name, default, text in (
        ("rounds", 3, "pairs per cell and peer"),
        ("threads", os.cpu_count() or 1, "threads per engine"),
        ("attempts", 3, "attempts at a disturbed pair"),
        ("minutes", 600.0, "stop after N minutes; repeat the command to continue"),
    ):
        add(f"--{name}", type=type(default), default=default, metavar="N", help=f"{text} (default: {default:g})")
    text = "directory of environments, models and stored pairs"
    add("--directory", type=Path, default=ROOT / ".venv-peers", metavar="DIR", help=text)
    add("--install-only", action="store_true", help="install the environments and measure nothing")
    arguments = read_arguments(parser, argv)
    if min(arguments.rounds, arguments.threads, arguments.attempts) < 1:
        parser.error("--rounds, --threads and --attempts must be at least 1")
    return parser, arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Install, measure, write JSON. Return the exit code: 0; 1 if the minutes ran out or an installation failed."""
    parser, arguments = _arguments(argv)
    files, peers = PeerFiles(arguments.directory), [peer for peer in PEERS if peer.name in arguments.peers]
    unavailable = install_all(files, peers)
    if arguments.install_only:
        for name, reason in unavailable.items():
            print(f"{name}: {reason}", file=sys.stderr)
        return 1 if unavailable else 0
    facts = provenance(parser.prog, arguments.given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    cells = make_cells(arguments.shapes, arguments.precisions, arguments.kinds)
    kept = PairStore(files.directory / "progress.jsonl")
    comparison = Comparison(files, arguments.threads, arguments.attempts, kept)
    with ExitStack() as stack:
        stack.callback(comparison.stop_all)
        # Run the exit callbacks, which stop the engines.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        rows = list(itertools.product(cells, [peer for peer in peers if peer.name not in unavailable]))
        deadline_seconds = time.monotonic() + 60 * arguments.minutes
        is_whole = compare(comparison, rows, num_rounds=arguments.rounds, deadline_seconds=deadline_seconds)
    result = {
        "kind": "peers",
        "took_seconds": round(sum(pair.seconds for pair in kept.pairs), 1),
        "settings": {"threads": arguments.threads, "rounds": arguments.rounds},
        "shapes": {shape: SHAPE_SIZES[shape] for shape in arguments.shapes},
        "peers": {
            peer.name: {
                "note": peer.note,
                "pins": _pins(peer.environment),
                "unavailable": unavailable.get(peer.name),
            }
            for peer in peers
        },
        "cells": list(kept.summarize(cells, arguments.peers)),
    }
    tell(facts | result, arguments.out)
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
