"""Generator of the measured parts of docs/attention.md and its picture, from docs/results/attention.json.

python -m loadtest.docgen.attention_page            write the page and its picture
python -m loadtest.docgen.attention_page --check    exit with 1 if the page or the picture does not match the results

Text between `<!-- measured: NAME -->` and `<!-- end -->` is replaced. The rest of the page is written by hand.

Random error: two rows trained from one seed see the same texts in the same order, so losses are compared seed by seed.
The variation of such differences between seeds is estimated from all rows together (pooled standard deviation),
because a few seeds of one row are too few.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.docgen.performance_page import RESULTS, ROOT, machine_table, write_or_check
from loadtest.docgen.pictures import draw_attention
from loadtest.measurement.tables import Column, table

PAGE = ROOT / "docs" / "attention.md"
# Two standard errors: chance alone exceeds two standard errors in about one of twenty comparisons.
_ERRORS = 2.0
_MARKED = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OVERVIEW_COLUMNS = (
    Column("mechanism", "title"),
    Column("what it changes", "changed"),
    Column("parameters", "parameters", ","),
    Column("held-out loss", "loss", ".3f"),
    Column("trained tokens/s", "trained_tokens_per_second.median", ",.0f"),
    Column("served tokens/s", "served_tokens_per_second.median", ",.0f"),
    Column("KV-cache bytes a token", "kv_bytes_per_token", ","),
)
_COMPARED_COLUMNS = (
    Column("compared with", "other"),
    Column("difference", "difference"),
    Column("it is", "verdict"),
)
_SPEED_COLUMNS = (
    Column("mechanism", "title"),
    Column("trained tokens/s", "trained_tokens_per_second", ",.0f"),
    Column("of the baseline's", "trained_ratio", ".2f"),
    Column("served tokens/s", "served_tokens_per_second", ",.0f"),
    Column("of the baseline's", "served_ratio", ".2f"),
)
_KERNEL_COLUMNS = (
    Column("tokens", "length", ","),
    Column("scores, if stored", "score_bytes", ",.1f", 2**-20, " MiB"),
    Column("written out, ms", "eager_ms", ".2f"),
    Column("fused, ms", "fused_ms", ".2f"),
    Column("times faster", "ratio", ".1f"),
)


class Difference(NamedTuple):
    """Difference of a row's held-out loss from its compared row: nats per token, mean over seeds.

    error: two standard errors of the mean.
    """

    mean: float
    error: float

    @property
    def verdict(self) -> str:
        """Verdict in words: a difference counts only if it is larger than its error."""
        if abs(self.mean) <= self.error:
            return "within the noise"
        return "better" if self.mean < 0 else "worse"


def losses(row: Mapping[str, Any]) -> list[float]:
    """Return the held-out nats per token of each seed."""
    return [run["nats_per_token"] for run in row["runs"]]


def differences(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Difference]:
    """Return each row's difference from its compared row. A row compared with itself is left out."""
    by_seed = {
        name: [own - other for own, other in zip(losses(row), losses(rows[row["compared_with"]]), strict=True)]
        for name, row in rows.items()
        if row["compared_with"] != name
    }
    deviation = pooled_deviation(list(by_seed.values()))
    return {
        name: Difference(statistics.fmean(values), _ERRORS * deviation / math.sqrt(len(values)))
        for name, values in by_seed.items()
    }


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Return the root of the mean within-group variance, weighted by degrees of freedom.

    Raises:
        ValueError: no group has two values.
    """
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < 1:
        raise ValueError("one seed shows no noise; train a second seed by bench_attention train --seeds 1 2")
    return math.sqrt(sum((len(values) - 1) * statistics.variance(values) for values in groups) / freedom)


def parts(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the measured parts of the page.

    Raises:
        KeyError: a result lacks a field that the page needs, because a phase of the benchmark has not run.
        ValueError: only one seed was trained.
    """
    training, speed = results["train"], results["speed"]
    settings, found, seeds = training["settings"], differences(training["rows"]), training["settings"]["seeds"]
    titles = {name: row["title"] for name, row in training["rows"].items()}
    rows = []
    for name, row in training["rows"].items():
        compared: dict[str, str | None] = {"other": None, "difference": None, "verdict": None}
        if difference := found.get(name):
            text = f"{difference.mean:+.3f} ± {difference.error:.3f}"
            compared = {"other": titles[row["compared_with"]], "difference": text, "verdict": difference.verdict}
        by_seed = {f"seed {seed}": loss for seed, loss in zip(seeds, losses(row), strict=True)}
        facts = {"changed": _changes(row), "loss": statistics.fmean(losses(row))}
        rows.append(row | speed["rows"][name] | by_seed | facts | compared)
    noise = pooled_deviation([losses(row) for row in training["rows"].values()])
    eager = speed["rows"]["eager"] | {"title": "the baseline, attention written out"}
    seed_columns = [Column(f"seed {seed}", f"seed {seed}", ".3f") for seed in seeds]
    minutes = settings["train_minutes"]
    commits = sorted({run["commit"] for row in rows for run in row["runs"]})
    phases = (training | {"took_seconds": 60.0 * minutes}, speed)
    return {
        "settings": _settings(settings, speed["settings"]),
        "overview": table(_OVERVIEW_COLUMNS, rows),
        "compared": table(
            (Column("mechanism", "title"), *seed_columns, *_COMPARED_COLUMNS), sorted(rows, key=lambda row: row["loss"])
        )
        + f"\nLosses of one row from several seeds differ by {noise:.3f} (standard deviation, of all rows together).\n",
        "speeds": table(_SPEED_COLUMNS, [*rows, eager]),
        "kernels": table(_KERNEL_COLUMNS, speed["kernels"]),
        "where": machine_table({f"`{phase['command']}`": phase for phase in phases})
        + f"\nThe {sum(len(row['runs']) for row in rows)} runs themselves took {minutes} minutes together, at commits "
        f"{', '.join(f'`{commit}`' for commit in commits)}.\n",
    }


def _changes(row: Mapping[str, Any]) -> str:
    """Return the recipe's changes as its file writes them, with fractions shortened."""
    texts = []
    for key, value in row["changes"].items():
        text = f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
        texts.append(f"`{key}={text}`")
    of_other = "" if row["compared_with"] == "multi-head" else f"of {row['compared_with']}: "
    return of_other + ", ".join(texts) if texts else "–"


def _settings(training: Mapping[str, Any], speed: Mapping[str, Any]) -> str:
    tokens = training["steps"] * training["batch_size"] * training["sequence_length"]
    return (
        f"Losses: {training['steps']} steps of {training['batch_size']} x {training['sequence_length']} tokens "
        f"({tokens / 1e6:.1f} million), a BPE of {training['vocab_size']:,} tokens learned from the same texts, "
        f"seeds {', '.join(map(str, training['seeds']))}, {' and '.join(training['precision'])}. "
        f"Speeds: median of {speed['rounds']} rounds, {speed['threads']} thread{'s' if speed['threads'] > 1 else ''}; "
        f"a round trains {speed['train_steps']} steps of each mechanism in {speed['train_precision']} and serves "
        f"{speed['streams']} streams of {speed['prompt_tokens']} + {speed['output_tokens']} tokens from its checkpoint "
        f"in {speed['serve_dtype']}.\n"
    )


def render(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with its measured parts replaced.

    Raises:
        KeyError, ValueError: as `parts`; also ValueError if the page lacks a part or names an unknown part.
    """
    measured = parts(results)
    named = [match.group(2) for match in _MARKED.finditer(page)]
    if sorted(named) != sorted(measured):
        raise ValueError(f"the page must have each part once: {', '.join(measured)}; the page has {', '.join(named)}")
    return _MARKED.sub(lambda match: match.group(1) + measured[match.group(2)] + match.group(3), page)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check page and picture. Return the exit code: 0; 1 if one differs; 2 if results are missing."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.docgen.attention_page", description="Write the page.")
    parser.add_argument("--results", type=Path, default=RESULTS / "attention.json", metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/attention.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if page or picture differs")
    arguments = parser.parse_args(argv)
    try:
        results = json.loads(arguments.results.read_text(encoding="utf-8"))
        page = render(arguments.page.read_text(encoding="utf-8"), results)
    except KeyError as error:
        remedy = "run python -m loadtest.inprocess.bench_attention"
        print(f"{parser.prog}: {arguments.results} lacks {error}: {remedy}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    rows = results["train"]["rows"]
    picture = arguments.page.with_name("attention.png")
    noise = pooled_deviation([losses(row) for row in rows.values()])
    pictures = {picture: (lambda path, of: draw_attention(path, of, noise), rows)}
    return write_or_check(parser.prog, arguments.page, page, pictures, check=arguments.check)


if __name__ == "__main__":
    raise SystemExit(main())
