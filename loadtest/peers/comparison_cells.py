"""Cells of the comparison with other engines, measured pairs, and their ratios. Torch-free."""

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from loadtest.measurement.spread import ratio_spread, spread

Kind = Literal["decode", "prompt", "http"]
KINDS: Final[tuple[Kind, ...]] = ("decode", "http", "prompt")
PRECISIONS: Final = ("bfloat16", "int8", "float32")
DEFAULTS: Final = "defaults"  # used as a precision: a bfloat16 file, and both servers started without flags
PROMPT_TOKENS: Final = 64
# Kind, streams, tokens of a prompt, tokens of a completion. Long prompts have a mean context of 1,024 tokens.
_DEFAULTS_SIZES: Final[tuple[tuple[Kind, int, int, int], ...]] = tuple(
    ("http", streams, PROMPT_TOKENS, 128) for streams in (1, 4, 16, 64)
)
_SIZES: Final[tuple[tuple[Kind, int, int, int], ...]] = (
    ("decode", 1, PROMPT_TOKENS, 256),
    *(("decode", streams, PROMPT_TOKENS, 128) for streams in (4, 16, 64)),
    *(size for size in _DEFAULTS_SIZES if size[1] != 4),
    ("prompt", 1, 1024, 1),
    *(("decode", streams, 992, 64) for streams in (1, 4, 16)),
)
_REQUESTS_PER_STREAM, _MIN_REQUESTS = 2, 3
_MAX_SLOW_REQUESTS = 64  # for a server without flags
# A pair is disturbed if other processes used more cores, or if a processor probe was below this share of the usual.
QUIET_CORES: Final = 0.2
STEADY_SHARE: Final = 0.85


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the comparison.

    kind: decode (tokens/s after all first tokens), prompt (prompt tokens/s until the first token), or http
    (tokens/s over a whole run of streaming clients).
    """

    shape: str
    precision: str
    kind: Kind
    streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def key(self) -> str:
        """Name of the cell in the file of measured pairs."""
        return "/".join(map(str, asdict(self).values()))

    @property
    def context_length(self) -> int:
        """Tokens of a sequence in the middle of its completion."""
        return self.prompt_tokens + self.output_tokens // 2

    @property
    def num_prompts(self) -> int:
        """Number of prompts that one measurement of the cell uses."""
        if self.kind != "http":
            return self.streams
        wanted = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * self.streams)
        return min(wanted, _MAX_SLOW_REQUESTS) if self.precision == DEFAULTS else wanted


def make_cells(shapes: Sequence[str], precisions: Sequence[str], kinds: Sequence[Kind]) -> list[Cell]:
    """Return the requested cells, shape by shape. The precision `DEFAULTS` has cells of kind http only."""
    return [
        Cell(shape, precision, *size)
        for shape, precision in itertools.product(shapes, precisions)
        for size in (_DEFAULTS_SIZES if precision == DEFAULTS else _SIZES)
        if size[0] in kinds
    ]


def random_prompts(cell: Cell, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids for one measurement, so that no prefix is cached.

    The vocabulary's last id is left out, because it may end a text.
    """
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size - 1) for _ in range(cell.prompt_tokens)] for _ in range(cell.num_prompts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPair:
    """Figures of Kvasir and a peer in one cell, measured one right after the other, or the peer's error.

    ours, theirs: figures by name; "tokens_per_second" is compared.
    gflops: probes of all processors before, between and after the two sides.
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
    """Append-only file of measured pairs, from which an interrupted comparison continues. Skips a cut-off last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        self.pairs = [ComparedPair(**json.loads(line)) for line in lines]

    def add(self, pair: ComparedPair) -> None:
        """Store a pair, in memory and in the file."""
        self.pairs.append(pair)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(pair)) + "\n")

    def has(self, cell: Cell, peer: str, number: int) -> bool:
        """Return True if the pair of this round was measured undisturbed."""
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
        """Return the lowest processor probe of a pair relative to the median of all probes; 1 without probes."""
        probes = [probe for each in self.pairs for probe in each.gflops]
        return min(pair.gflops) / statistics.median(probes) if pair.gflops else 1.0

    def _summary(self, pairs: Sequence[ComparedPair]) -> dict[str, Any]:
        def disturbance(pair: ComparedPair) -> tuple[bool, float]:
            return self._speed_share(pair) < STEADY_SHARE, pair.other_work_cores

        measured = [pair for pair in pairs if pair.error is None]
        if not measured:
            return {"error": pairs[-1].error}
        best = {pair.round: pair for pair in sorted(measured, key=disturbance, reverse=True)}
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
    """Return True if neither other processes nor slow processors disturbed a measurement."""
    return max(other_work_cores) <= QUIET_CORES and min(processors_share) >= STEADY_SHARE


def is_sound(figure: Mapping[str, Any]) -> bool:
    """Return True if a peer has figures in this row of the results and none of its pairs was disturbed."""
    return "ratio" in figure and is_quiet(figure["other_work_cores"], figure["processors_share"])
