"""Cells of the comparison with other engines, stored measurements, and ratios.

Each pair of figures, Kvasir's and a peer's taken one right after the other, is appended to a file as a line of
JSON. An interrupted comparison therefore continues where it stopped. Torch-free.
"""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from loadtest.measurement.spread import Spread

Kind = Literal["decode", "prompt", "http"]
KINDS: Final[tuple[Kind, ...]] = ("decode", "http", "prompt")
PRECISIONS: Final = ("bfloat16", "int8", "float32")
# Used as a precision: a bfloat16 file, and both servers started without flags.
DEFAULTS: Final = "defaults"
STREAMS: Final = (1, 4, 16, 64)
HTTP_STREAMS: Final = (1, 16, 64)
LONG_STREAMS: Final = (1, 4, 16)
PROMPT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS_ALONE = 64, 128, 256
LONG_CONTEXT, LONG_OUTPUT = 1024, 64
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


def make_cells(shapes: Sequence[str], precisions: Sequence[str], kinds: Sequence[Kind]) -> list[Cell]:
    """Return the requested cells, shape by shape. `DEFAULTS` has cells of kind http only."""
    rows: list[tuple[Kind, int, int, int]] = [
        ("decode", streams, PROMPT_TOKENS, OUTPUT_TOKENS_ALONE if streams == 1 else OUTPUT_TOKENS)
        for streams in STREAMS
    ]
    rows += [("http", streams, PROMPT_TOKENS, OUTPUT_TOKENS) for streams in HTTP_STREAMS]
    rows.append(("prompt", 1, LONG_CONTEXT, 1))
    rows += [("decode", streams, LONG_CONTEXT - LONG_OUTPUT // 2, LONG_OUTPUT) for streams in LONG_STREAMS]
    defaults: list[tuple[Kind, int, int, int]] = [("http", n, PROMPT_TOKENS, OUTPUT_TOKENS) for n in STREAMS]
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
        for kind, streams, prompt, output in (defaults if precision == DEFAULTS else rows)
        if kind in kinds
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
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


class Progress:
    """Append-only file of measured pairs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.pairs: list[Pair] = []
        if path.is_file():
            # Skip a line that was cut off by a crash.
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            self.pairs = [Pair(**json.loads(line)) for line in lines]

    @property
    def usual_gflops(self) -> float:
        """Median of all processor probes; 0 before the first."""
        return _usual_gflops(self.pairs)

    def has(self, cell: Cell, peer: str, number: int) -> bool:
        """Return True if this pair was measured undisturbed. Disturbed and failed pairs are measured again."""
        own = (pair for pair in self.pairs if (pair.cell, pair.peer, pair.round) == (cell.key, peer, number))
        usual = _usual_gflops(self.pairs)
        return any(
            pair.other_work_cores is not None
            and pair.other_work_cores <= QUIET_CORES
            and _share(pair, usual) >= STEADY_SHARE
            for pair in own
        )

    def add(self, pair: Pair) -> None:
        """Store a pair, in memory and in the file."""
        self.pairs.append(pair)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(pair)) + "\n")


def summarize(cells: Iterable[Cell], pairs: Sequence[Pair]) -> Iterator[dict[str, Any]]:
    """Yield a JSON-ready row per cell: for each peer both medians, and the median of the ratios within pairs.

    If a pair was measured several times, the least disturbed one counts. A peer without a pair has its last error,
    or is absent.
    """
    usual = _usual_gflops(pairs)
    for cell in cells:
        peers: dict[str, Any] = {}
        for name in dict.fromkeys(pair.peer for pair in pairs if pair.cell == cell.key):
            own = [pair for pair in pairs if (pair.cell, pair.peer) == (cell.key, name)]
            best = _least_disturbed(own, usual)
            if not best:
                peers[name] = {"error": own[-1].error}
                continue
            ours, theirs = [pair.ours or {} for pair in best], [pair.theirs or {} for pair in best]
            peers[name] = {
                "ours": _spreads(ours),
                "theirs": _spreads(theirs),
                "ratio": Spread.of_ratios(_rates(ours), _rates(theirs)).to_dict(),
                "other_work_cores": [pair.other_work_cores for pair in best],
                "processors_share": [round(_share(pair, usual), 2) for pair in best],
            }
        yield {**asdict(cell), "context_length": cell.context_length, "peers": peers}


def is_sound(figure: Mapping[str, Any]) -> bool:
    """Return True if a peer has figures in this row and none of its pairs was disturbed."""
    if "ratio" not in figure:
        return False
    return bool(max(figure["other_work_cores"]) <= QUIET_CORES and min(figure["processors_share"]) >= STEADY_SHARE)


def _usual_gflops(pairs: Iterable[Pair]) -> float:
    probes = list(itertools.chain.from_iterable(pair.gflops for pair in pairs))
    return statistics.median(probes) if probes else 0.0


def _share(pair: Pair, usual: float) -> float:
    """Return the lowest probe of a pair relative to the usual speed; 1 without probes."""
    return min(pair.gflops) / usual if pair.gflops else 1.0


def _least_disturbed(pairs: Sequence[Pair], usual: float) -> list[Pair]:
    """Return the least disturbed pair of each round. Pairs at the processors' usual speed come first."""

    def disturbed(pair: Pair) -> tuple[bool, float]:
        assert pair.other_work_cores is not None, "the pair has figures"
        return _share(pair, usual) < STEADY_SHARE, pair.other_work_cores

    measured = [pair for pair in pairs if pair.other_work_cores is not None]
    rounds = sorted({pair.round for pair in measured})
    return [min((pair for pair in measured if pair.round == number), key=disturbed) for number in rounds]


def _rates(figures: Sequence[dict[str, float]]) -> list[float]:
    return [figure["tokens_per_second"] for figure in figures]


def _spreads(figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    names = [name for name in figures[0] if all(name in figure for figure in figures)]
    return {name: Spread(tuple(figure[name] for figure in figures)).to_dict() for name in names}
