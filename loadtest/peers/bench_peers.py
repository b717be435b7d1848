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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

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
    make_cells,
    summarize,
)
from loadtest.peers.comparison_cells import Progress as Kept
from loadtest.peers.installation import PINS, ROOT, PeerUnavailable, Place, give_model, give_our_model, install
from loadtest.peers.processes import Driver, Prompts, Server, num_prompts
from loadtest.peers.table import PEERS, Peer, Setting, our_engine, our_server

_AGREED = 16  # first tokens of a completion that are compared
_WARM_UP = "warm-up"  # replaces the name of a pair
_LOOK_SECONDS = 0.25


class Contest:
    """Runner of the comparison: starts the engines that are needed, measures pairs, and stops the engines.

    Args:
        arguments: directory, threads, patience, attempts.
        kept: stored pairs, to which new pairs are added.
        tell: callback that shows progress.
    """

    def __init__(self, arguments: argparse.Namespace, kept: Kept, tell: Callable[[str], None]) -> None:
        self._place = Place(arguments.directory)
        self._threads = arguments.threads
        self._probe = ProcessorProbe(arguments.threads)
        self._patience_seconds = arguments.patience
        self._attempts = arguments.attempts
        self._kept = kept
        self._tell = tell
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
                self._tell(f"waiting: {busy:.1f} cores are busy")
            elif (given := self._probe.gflops()) < STEADY_SHARE * self._kept.usual_gflops:
                self._tell(f"waiting: {given:.0f} of the usual {self._kept.usual_gflops:.0f} GFLOP/s")
            else:
                return
            if time.monotonic() >= deadline:
                return

    def _give_model(self, peer: Peer, cell: Cell) -> None:
        give_our_model(self._place, cell.shape, cell.precision)
        give_model(self._place, peer.environment, cell.shape, cell.precision)

    def _start(self, cell: Cell, peer: Peer, *, theirs: bool) -> None:
        """Start one side if it does not run, and warm it up for the cell."""
        name, is_server = peer.name if theirs else "ours", cell.kind == "http"
        running = self._running.get((name, is_server))
        if running is None:
            self._tell(f"starting {name}")
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
        self._tell(f"{cell.key} {name}")
        try:
            return self._running[name, is_server].measure(cell, prompts)
        except PeerUnavailable:
            self._end(name, is_server)
            raise

    def _prompts(self, cell: Cell, pair: str) -> list[list[int]]:
        """Return the prompts of a pair: the same for both sides, new for each pair, so that no prefix is cached."""
        seed = int.from_bytes(f"{cell.key} {pair}".encode(), "big")
        prompts = Prompts(SHAPE_SIZES[cell.shape]["vocab_size"], seed)
        return prompts.take(num_prompts(cell), cell.prompt_tokens)

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


def compare(
    arguments: argparse.Namespace, contest: Contest, rows: Sequence[tuple[Cell, Peer]], step: Callable[[], None]
) -> bool:
    """Measure every pair. Returns False if the minutes ran out."""
    deadline = time.monotonic() + 60 * arguments.minutes
    for _, group in itertools.groupby(rows, key=lambda row: (row[0].shape, row[0].precision)):
        of_a_model = list(group)
        for number, (cell, peer) in itertools.product(range(arguments.rounds), of_a_model):
            if time.monotonic() > deadline:
                contest.end_all()
                return False
            if peer.can(cell) and (peer.rounds is None or number < peer.rounds):
                contest.measure(cell, peer, number)
            step()
        contest.end_all()
    return True


def prepare(place: Place, names: Sequence[str], tell_progress: Callable[[str], None]) -> dict[str, str]:
    """Install missing environments. Returns the environments that are unavailable, with reasons."""
    unavailable = {}
    for environment in dict.fromkeys(peer.environment for peer in PEERS if peer.name in names):
        tell_progress(f"{environment}: installing")
        try:
            install(place, environment)
        except PeerUnavailable as error:
            unavailable[environment] = str(error)
    return unavailable


def result(arguments: argparse.Namespace, cells: Sequence[Cell], kept: Kept, unavailable: dict[str, str]) -> Any:
    """Return all results, JSON-ready."""
    peers = [peer for peer in PEERS if peer.name in arguments.peers]
    return {
        "kind": "peers",
        "took_seconds": round(sum(pair.seconds for pair in kept.pairs), 1),
        "settings": {"threads": arguments.threads, "rounds": arguments.rounds},
        "shapes": {shape: SHAPE_SIZES[shape] for shape in arguments.shapes},
        "peers": {
            peer.name: {
                "note": peer.note,
                "pins": [line for line in _pins(peer.environment) if line and not line.startswith("#")],
                "unavailable": unavailable.get(peer.environment),
            }
            for peer in peers
        },
        "cells": list(summarize(cells, [pair for pair in kept.pairs if pair.peer in arguments.peers])),
    }


def _pins(environment: str) -> list[str]:
    paths = sorted(PINS.glob(f"{environment}*.txt"))
    return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def table(found: dict[str, Any]) -> Table:
    """Return a table for the terminal with the ratio of Kvasir to each peer."""
    names = list(found["peers"])
    made = Table(
        title=f"speed of Kvasir relative to each peer, {found['settings']['threads']} threads (above 1: faster)"
    )
    for heading in ("shape", "precision", "kind", "streams", "context", "Kvasir, tokens/s", *names):
        made.add_column(heading, justify="right")
    for cell in found["cells"]:
        measured = {name: figure for name, figure in cell["peers"].items() if "ratio" in figure}
        ours = [figure["ours"]["tokens_per_second"]["median"] for figure in measured.values()]
        made.add_row(
            *(str(cell[name]) for name in ("shape", "precision", "kind", "streams", "context_length")),
            f"{max(ours):.0f}" if ours else "",
            *(f"{measured[name]['ratio']['median']:.2f}" if name in measured else "" for name in names),
        )
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.peers.bench_peers",
        description="Compare Kvasir's engine and service with other engines on the same model, in one run.",
    )
    add = parser.add_argument
    names = [peer.name for peer in PEERS]
    add("--out", type=Path, metavar="FILE", help="JSON output file (default: standard output)")
    add("--shapes", nargs="+", choices=sorted(SHAPE_SIZES), default=["S", "M"], help="model shapes (default: S M)")
    add(
        "--precisions",
        nargs="+",
        choices=(*PRECISIONS, DEFAULTS),
        default=list(PRECISIONS),
        help=f"default: all except {DEFAULTS} (a bfloat16 file served without flags)",
    )
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of cells (default: all)")
    add(
        "--peers",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"peers (default: all): {', '.join(names)}",
    )
    add("--rounds", type=int, default=3, metavar="N", help="pairs per cell and peer (default: %(default)s)")
    add(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="threads per engine (default: %(default)s)",
    )
    add(
        "--minutes", type=float, default=600.0, metavar="N", help="stop after N minutes; repeat the command to continue"
    )
    add(
        "--patience",
        type=float,
        default=20.0,
        metavar="S",
        help="longest wait for a quiet machine before each pair (default: %(default)s)",
    )
    add("--attempts", type=int, default=3, metavar="N", help="attempts at a disturbed pair (default: %(default)s)")
    add(
        "--directory",
        type=Path,
        default=ROOT / ".venv-peers",
        metavar="DIR",
        help="directory of environments and models",
    )
    add("--progress", type=Path, metavar="FILE", help="stored pairs (default: progress.jsonl in --directory)")
    add("--install-only", action="store_true", help="install the environments and measure nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Install, measure, write JSON. Return the exit code: 0; 1 if the minutes ran out or an installation failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_args(given)
    if min(arguments.rounds, arguments.threads, arguments.attempts) < 1:
        parser.error("--rounds, --threads and --attempts must be at least 1")
    place = Place(arguments.directory)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar, ExitStack() as stack:
        cells = make_cells(arguments.shapes, arguments.precisions, arguments.kinds)
        task = bar.add_task("", total=len(cells) * arguments.rounds * len(arguments.peers))
        say = lambda text: bar.update(task, description=text)  # noqa: E731
        unavailable = prepare(place, arguments.peers, say)
        if arguments.install_only:
            for environment, reason in unavailable.items():
                print(f"{environment}: {reason}", file=sys.stderr)
            return 1 if unavailable else 0
        facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
        kept = Kept(arguments.progress or place.directory / "progress.jsonl")
        contest = Contest(arguments, kept, say)
        stack.callback(contest.end_all)
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # run the exit callbacks, which stop the engines
        peers = [peer for peer in PEERS if peer.name in arguments.peers and peer.environment not in unavailable]
        is_whole = compare(arguments, contest, list(itertools.product(cells, peers)), lambda: bar.advance(task))
    found = facts | result(arguments, cells, kept, unavailable)
    Console(stderr=True).print(table(found))
    tell(found, arguments.out)
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
