"""Cells of the comparison with other engines, stored measurements, and ratios. Torch-free.

Each pair of figures, Kvasir's and a peer's taken one right after the other, is appended to a file as a line of
JSON. An interrupted comparison therefore continues where it stopped.
"""

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
# Used as a precision: a bfloat16 file, and both servers started without flags.
DEFAULTS: Final = "defaults"
PROMPT_TOKENS: Final = 64
# Kind, streams, tokens of a prompt, tokens of a completion. The long ones have a mean context of 1,024 tokens.
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
# A pair is measured again if other processes used more cores, or if the processors gave a smaller share of their usual
# speed.
QUIET_CORES: Final = 0.2
STEADY_SHARE: Final = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One row of the comparison: shape, precision, kind, streams, and lengths of prompt and completion.

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
        """Name of the cell in the stored file."""
        return "/".join(map(str, asdict(self).values()))

    @property
    def context_length(self) -> int:
        """Tokens of a sequence in the middle of its completion."""
        return self.prompt_tokens + self.output_tokens // 2

    @property
    def num_prompts(self) -> int:
        """Number of prompts that a measurement of this cell uses."""
        if self.kind != "http":
            return self.streams
        wanted = max(_MIN_REQUESTS, _REQUESTS_PER_STREAM * self.streams)
        return min(wanted, _MAX_SLOW_REQUESTS) if self.precision == DEFAULTS else wanted


def make_cells(shapes: Sequence[str], precisions: Sequence[str], kinds: Sequence[Kind]) -> list[Cell]:
    """Return the requested cells, shape by shape. `DEFAULTS` has cells of kind http only."""
    return [
        Cell(
            shape=shape,
            precision=precision,
            kind=kind,
            streams=streams,
            prompt_tokens=prompt,
            output_tokens=output,
        )
        for shape, precision in itertools.product(shapes, precisions)
        for kind, streams, prompt, output in (_DEFAULTS_SIZES if precision == DEFAULTS else _SIZES)
        if kind in kinds
    ]


def random_prompts(cell: Cell, vocab_size: int, seed: int) -> list[list[int]]:
    """Return a measurement's prompts: random token ids, so that no prefix is cached.

    The vocabulary's last id is left out, because it may end a text.
    """
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size - 1) for _ in range(cell.prompt_tokens)] for _ in range(cell.num_prompts)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPair:
    """Figures of Kvasir and a peer in one cell, measured one right after the other, or the peer's error.

    ours, theirs: figures by name; "tokens_per_second" is the one that is compared.
    other_work_cores: cores used by other processes meanwhile.
    gflops: probes of all processors before, between and after the two sides.
    seconds: duration of both sides.
    """

    cell: str
    peer: str
    round: int
    ours: dict[str, float] | None = None
    theirs: dict[str, float] | None = None
    other_work_cores: float | None = None
    gflops: list[float] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None


class PairStore:
    """Append-only file of measured pairs of Kvasir and another engine. A cut-off last line is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
        self.pairs = [ComparedPair(**json.loads(line)) for line in lines]

    @property
    def usual_gflops(self) -> float:
        """Median of all processor probes; 0 before the first."""
        probes = [probe for pair in self.pairs for probe in pair.gflops]
        return statistics.median(probes) if probes else 0.0

    def add(self, pair: ComparedPair) -> None:
        """Store a pair, in memory and in the file."""
        self.pairs.append(pair)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(pair)) + "\n")

    def has(self, cell: Cell, peer: str, number: int) -> bool:
        """Return True if this pair was measured undisturbed. Disturbed and failed pairs are measured again."""
        usual = self.usual_gflops
        return any(
            pair.other_work_cores is not None
            and pair.other_work_cores <= QUIET_CORES
            and _speed_share(pair, usual) >= STEADY_SHARE
            for pair in self._of(cell, peer)
            if pair.round == number
        )

    def summarize(self, cells: Sequence[Cell], peers: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield a JSON-ready row per cell: for each peer both medians, and the median of the ratios within pairs.

        If a pair was measured several times, the least disturbed one counts. A peer without a pair has its last error,
        or is absent.
        """
        usual = self.usual_gflops
        for cell in cells:
            measured = {peer: found for peer in peers if (found := self._of(cell, peer))}
            rows = {peer: _summary(found, usual) for peer, found in measured.items()}
            yield {**asdict(cell), "context_length": cell.context_length, "peers": rows}

    def _of(self, cell: Cell, peer: str) -> list[ComparedPair]:
        return [pair for pair in self.pairs if (pair.cell, pair.peer) == (cell.key, peer)]


def _speed_share(pair: ComparedPair, usual: float) -> float:
    """Return the lowest probe of a pair relative to the usual speed; 1 without probes."""
    return min(pair.gflops) / usual if pair.gflops else 1.0


def _summary(pairs: Sequence[ComparedPair], usual: float) -> dict[str, Any]:
    # Of each round, the least disturbed pair. Pairs at the processors' usual speed come first.
    best: dict[int, tuple[bool, float, ComparedPair]] = {}
    for pair in pairs:
        if pair.other_work_cores is not None:
            rank = (_speed_share(pair, usual) < STEADY_SHARE, pair.other_work_cores)
            if pair.round not in best or rank < best[pair.round][:2]:
                best[pair.round] = (*rank, pair)
    if not best:
        return {"error": pairs[-1].error}
    chosen = [best[number][2] for number in sorted(best)]
    ours, theirs = [pair.ours or {} for pair in chosen], [pair.theirs or {} for pair in chosen]
    return {
        "ours": _spreads(ours),
        "theirs": _spreads(theirs),
        "ratio": ratio_spread(*([figures["tokens_per_second"] for figures in side] for side in (ours, theirs))),
        "other_work_cores": [pair.other_work_cores for pair in chosen],
        "processors_share": [round(_speed_share(pair, usual), 2) for pair in chosen],
    }


def _spreads(figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    names = [name for name in figures[0] if all(name in figure for figure in figures)]
    return {name: spread(figure[name] for figure in figures) for name in names}


def is_sound(figure: Mapping[str, Any]) -> bool:
    """Return True if a peer has figures in this row and none of its pairs was disturbed."""
    if "ratio" not in figure:
        return False
    return bool(max(figure["other_work_cores"]) <= QUIET_CORES and min(figure["processors_share"]) >= STEADY_SHARE)
