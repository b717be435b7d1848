"""Benchmark of Kvasir's engine and service against other engines: same random weights, threads and work, in one run.

    python -m loadtest.peers.bench_peers --out docs/results/peers.json

The benchmark creates an environment for each peer under .venv-peers (gigabytes, and ten minutes of compiling,
once). It exports the model to each peer's format. Then it measures pairs, cell by cell, in rounds: Kvasir, a peer,
Kvasir, the next peer. A ratio is taken within a pair.

Measured pairs are stored, so the same command continues an interrupted run. A peer that cannot be installed is
listed with the reason. Run it on a quiet machine: engine threads wait for each other, so they are slowed by any other
load.
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

from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, show
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
    Kind,
    Pair,
    Progress,
    make_cells,
    summarize,
)
from loadtest.peers.engines import PEERS, Peer, Setting, our_engine, our_server
from loadtest.peers.installation import PINS, ROOT, PeerUnavailable, Place, give_model, give_our_model, install
from loadtest.peers.processes import Driver, Server, random_prompts

_AGREED = 16  # first tokens of a completion that are compared
_WARM_UP = "warm-up"  # replaces the name of a pair
_LOOK_SECONDS = 0.25


class Contest:
    """Runner of the comparison: starts the engines that are needed, measures pairs, and stops the engines.

    Args:
        arguments: directory, threads, patience, attempts.
        kept: stored pairs, to which new pairs are added.
    """

    def __init__(self, arguments: argparse.Namespace, kept: Progress) -> None:
        self._place = Place(arguments.directory)
        self._threads = arguments.threads
        self._probe = ProcessorProbe(arguments.threads)
        self._patience_seconds = arguments.patience
        self._attempts = arguments.attempts
        self._kept = kept
        self._running: dict[tuple[str, bool], Driver | Server] = {}
        self._warm: set[tuple[str, Kind, int]] = set()

    def measure(self, cell: Cell, peer: Peer, number: int) -> None:
        """Measure one pair, unless it is stored."""
        if self._kept.has(cell, peer.name, number):
            return
        try:
            self._give_model(peer, cell)
            for is_theirs in (False, True):
                self._start(cell, peer, theirs=is_theirs)
            for attempt in range(self._attempts):
                self._wait_for_quiet()
                self._kept.add(self._pair(cell, peer, number, attempt))
                if self._kept.has(cell, peer.name, number):
                    return
        except PeerUnavailable as error:
            self._kept.add(Pair(cell=cell.key, peer=peer.name, round=number, error=str(error)))

    def _pair(self, cell: Cell, peer: Peer, number: int, attempt: int) -> Pair:
        """Measure both sides with fresh prompts. The side that goes first alternates between rounds."""
        prompts = self._prompts(cell, f"{peer.name} {number} {attempt}")
        foreign, began = ForeignWork(), time.monotonic()
        theirs_first = number % 2 == 1
        gflops, figures = [self._probe.gflops()], []
        for is_theirs in (theirs_first, not theirs_first):
            figures.append(self._figures(cell, peer, prompts, theirs=is_theirs))
            gflops.append(self._probe.gflops())
        busy, took = round(foreign.cores(), 2), round(time.monotonic() - began, 1)
        theirs, ours = figures if theirs_first else figures[::-1]
        mine, other = ours.pop("token_ids", []), theirs.pop("token_ids", [])
        if mine and other:
            theirs["first_tokens_alike"] = float(_num_alike(mine[:_AGREED], other[:_AGREED]))
        facts: dict[str, Any] = {"ours": ours, "theirs": theirs, "other_work_cores": busy, "seconds": took}
        given = [round(each, 1) for each in gflops]
        return Pair(cell=cell.key, peer=peer.name, round=number, gflops=given, **facts)

    def _wait_for_quiet(self) -> None:
        """Wait until no other process is busy and the processors have their usual speed, up to the patience."""
        deadline = time.monotonic() + self._patience_seconds
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

    def _give_model(self, peer: Peer, cell: Cell) -> None:
        give_our_model(self._place, cell.shape, cell.precision)
        give_model(self._place, peer.environment, cell.shape, cell.precision)

    def _start(self, cell: Cell, peer: Peer, *, theirs: bool) -> None:
        """Start one side if it does not run, and warm it up for the cell."""
        name, is_server = peer.name if theirs else "ours", cell.kind == "http"
        running = self._running.get((name, is_server))
        if running is None:
            setting = Setting(place=self._place, shape=cell.shape, precision=cell.precision, threads=self._threads)
            start = (peer.server if is_server else peer.engine) if theirs else (our_server if is_server else our_engine)
            assert start is not None, "the peer supports this cell"
            self._running[name, is_server] = start(setting)
        warm = (name, cell.kind, cell.streams)
        if warm not in self._warm:  # the first wave of a size is slower
            self._warm.add(warm)
            little = dataclasses.replace(cell, output_tokens=2)
            self._figures(little, peer, self._prompts(cell, _WARM_UP), theirs=theirs)

    def _figures(self, cell: Cell, peer: Peer, prompts: list[list[int]], *, theirs: bool) -> dict[str, Any]:
        """Measure one side. An engine that fails is stopped."""
        name, is_server = peer.name if theirs else "ours", cell.kind == "http"
        show(f"{cell.key} {name}")
        try:
            return self._running[name, is_server].measure(cell, prompts)
        except PeerUnavailable:
            self._end(name, is_server)
            raise

    def _prompts(self, cell: Cell, pair: str) -> list[list[int]]:
        """Return the prompts of a pair: the same for both sides, new for each pair, so that no prefix is cached."""
        seed = int.from_bytes(f"{cell.key} {pair}".encode(), "big")
        return random_prompts(cell, SHAPE_SIZES[cell.shape]["vocab_size"], seed)

    def _end(self, name: str, is_server: bool) -> None:
        self._running.pop((name, is_server)).close()
        self._warm = {warm for warm in self._warm if warm[0] != name or (warm[1] == "http") != is_server}

    def end_all(self) -> None:
        """Stop all engines: before another model or precision, and at the end."""
        for name, is_server in list(self._running):
            self._end(name, is_server)


def _num_alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of equal tokens at the start."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def compare(arguments: argparse.Namespace, contest: Contest, rows: Sequence[tuple[Cell, Peer]]) -> bool:
    """Measure every pair. Returns False if the minutes ran out."""
    deadline = time.monotonic() + 60 * arguments.minutes
    for _, group in itertools.groupby(rows, key=lambda row: (row[0].shape, row[0].precision)):
        of_a_model = list(group)
        for number, (cell, peer) in itertools.product(range(arguments.rounds), of_a_model):
            if time.monotonic() > deadline:
                return False
            if peer.can(cell) and (peer.rounds is None or number < peer.rounds):
                contest.measure(cell, peer, number)
        contest.end_all()
    return True


def prepare(place: Place, peers: Sequence[Peer]) -> dict[str, str]:
    """Install missing environments. Returns the environments that are unavailable, with reasons."""
    unavailable = {}
    for environment in dict.fromkeys(peer.environment for peer in peers):
        try:
            install(place, environment)
        except PeerUnavailable as error:
            unavailable[environment] = str(error)
    return unavailable


def _pins(environment: str) -> list[str]:
    paths = sorted(PINS.glob(f"{environment}*.txt"))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
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
        ("patience", 20.0, "longest wait for a quiet machine before each pair, in seconds"),
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
    place, peers = Place(arguments.directory), [peer for peer in PEERS if peer.name in arguments.peers]
    unavailable = prepare(place, peers)
    if arguments.install_only:
        for environment, reason in unavailable.items():
            print(f"{environment}: {reason}", file=sys.stderr)
        return 1 if unavailable else 0
    facts = provenance(parser.prog, arguments.given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    cells = make_cells(arguments.shapes, arguments.precisions, arguments.kinds)
    kept = Progress(place.directory / "progress.jsonl")
    contest = Contest(arguments, kept)
    with ExitStack() as stack:
        stack.callback(contest.end_all)
        # Run the exit callbacks, which stop the engines.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        available = [peer for peer in peers if peer.environment not in unavailable]
        is_whole = compare(arguments, contest, list(itertools.product(cells, available)))
    result = {
        "kind": "peers",
        "took_seconds": round(sum(pair.seconds for pair in kept.pairs), 1),
        "settings": {"threads": arguments.threads, "rounds": arguments.rounds},
        "shapes": {shape: SHAPE_SIZES[shape] for shape in arguments.shapes},
        "peers": {
            peer.name: {
                "note": peer.note,
                "pins": _pins(peer.environment),
                "unavailable": unavailable.get(peer.environment),
            }
            for peer in peers
        },
        "cells": list(summarize(cells, [pair for pair in kept.pairs if pair.peer in arguments.peers])),
    }
    tell(facts | result, arguments.out)
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
