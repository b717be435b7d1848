"""Generator of the measured parts of docs/attention.md and its picture, from docs/results/attention.json.

python -m loadtest.docgen.attention_page            write them
python -m loadtest.docgen.attention_page --check    exit with 1 if page or picture does not match the results

Text between `<!-- measured: NAME -->` and `<!-- end -->` is replaced. The rest of the page is written by hand.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.docgen.attention_plot import draw
from loadtest.inprocess.seed_noise import differences, losses, mean_loss, seed_spread
from loadtest.measurement.provenance import shows

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results" / "attention.json"
PAGE = ROOT / "docs" / "attention.md"
PICTURE = ROOT / "docs" / "attention.png"

_MARKED = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with its measured parts replaced.

    Raises:
        KeyError: a result lacks a field that the page needs, because a phase of the benchmark has not run.
        ValueError: the page names an unknown part, or lacks a part.
    """
    named = [match.group(2) for match in _MARKED.finditer(page)]
    if sorted(named) != sorted(PARTS):
        raise ValueError(f"the page must have each of these parts once: {', '.join(PARTS)}; it has {', '.join(named)}")
    return _MARKED.sub(lambda match: match.group(1) + PARTS[match.group(2)](results) + match.group(3), page)


def _overview(results: Mapping[str, Any]) -> str:
    speed = results["speed"]["rows"]
    rows = [
        [
            row["title"],
            _changes(row),
            f"{row['parameters']:,}",
            f"{mean_loss(row):.3f}",
            _whole(speed[name]["trained_tokens_per_second"]["median"]),
            _whole(speed[name]["served_tokens_per_second"]["median"]),
            f"{row['kv_bytes_per_token']:,}",
        ]
        for name, row in results["train"]["rows"].items()
    ]
    head = ["mechanism", "what it changes", "parameters", "held-out loss", "trained tokens/s", "served tokens/s"]
    return _table([*head, "KV-cache bytes a token"], rows, numbers=5)


def _changes(row: Mapping[str, Any]) -> str:
    """Return the recipe's changes as its file writes them."""
    if not row["changes"]:
        return "–"
    changes = ", ".join(f"`{key}={_plain(value)}`" for key, value in row["changes"].items())
    other = row["compared_with"]
    return changes if other == "multi-head" else f"of {other}: {changes}"


def _plain(value: object) -> str:
    """Format a value as in a recipe; a long fraction is shortened."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _compared(results: Mapping[str, Any]) -> str:
    training = results["train"]
    rows_of, settings = training["rows"], training["settings"]
    found = differences(rows_of)
    rows = []
    for name, row in sorted(rows_of.items(), key=lambda item: mean_loss(item[1])):
        cells = [row["title"], *(f"{losses(row)[seed]:.3f}" for seed in settings["seeds"])]
        if name in found:
            error = "" if found[name].error is None else f" ± {found[name].error:.3f}"
            compared = [rows_of[row["compared_with"]]["title"], f"{found[name].mean:+.3f}{error}", found[name].verdict]
        else:
            compared = ["–", "–", "–"]
        rows.append([*cells, *compared])
    head = ["mechanism", *(f"seed {seed}" for seed in settings["seeds"]), "compared with", "difference", "it is"]
    spread = seed_spread(rows_of)
    noise = (
        "One seed was trained, so nothing is known of the noise."
        if spread is None
        else f"Losses of one row from several seeds differ by {spread:.3f} (standard deviation, of all rows together)."
    )
    return _table(head, rows, numbers=0) + f"\n{noise}\n"


def _speeds(results: Mapping[str, Any]) -> str:
    speed, titles = results["speed"], {name: row["title"] for name, row in results["train"]["rows"].items()}
    titles["eager"] = "the baseline, attention written out"
    rows = [
        [
            titles[name],
            _spread(row["trained_tokens_per_second"], ",.0f"),
            _spread(row["trained_ratio"], ".2f"),
            _spread(row["served_tokens_per_second"], ",.0f"),
            _spread(row["served_ratio"], ".2f"),
        ]
        for name, row in speed["rows"].items()
    ]
    head = ["mechanism", "trained tokens/s", "of the baseline's", "served tokens/s", "of the baseline's"]
    return _table(head, rows, numbers=4)


def _kernels(results: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{point['length']:,}",
            f"{point['score_bytes'] / 2**20:,.1f} MiB",
            _spread(point["eager_ms"], ".2f"),
            _spread(point["fused_ms"], ".2f"),
            _spread(point["ratio"], ".1f"),
        ]
        for point in results["speed"]["kernels"]
    ]
    head = ["tokens", "scores, if stored", "written out, ms", "fused, ms", "times faster"]
    return _table(head, rows, numbers=5)


def _settings(results: Mapping[str, Any]) -> str:
    training, speed = results["train"]["settings"], results["speed"]["settings"]
    tokens = training["steps"] * training["batch_size"] * training["sequence_length"]
    seeds = training["seeds"]
    return (
        f"Losses: {training['steps']} steps of {training['batch_size']} x {training['sequence_length']} tokens "
        f"({tokens / 1e6:.1f} million), a BPE of {training['vocab_size']:,} tokens learned from the same texts, "
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, {' and '.join(training['precision'])}. "
        f"Speeds: median of {speed['rounds']} rounds, {speed['threads']} thread{'s' if speed['threads'] > 1 else ''}; "
        f"a round trains {speed['train_steps']} steps of each mechanism in {speed['train_precision']} and serves "
        f"{speed['streams']} streams of {speed['prompt_tokens']} + {speed['output_tokens']} tokens from its checkpoint "
        f"in {speed['serve_dtype']}.\n"
    )


def _where(results: Mapping[str, Any]) -> str:
    rows = []
    for phase in ("train", "speed"):
        result = results[phase]
        machine, versions = result["machine"], result["versions"]
        rows.append(
            [
                f"`{result['command']}`",
                result["date"],
                f"`{result['commit']}`",
                f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:g} GiB",
                f"{result['other_work_cores']:.2f} cores",
                f"Python {versions['python']}, torch {versions['torch']}",
            ]
        )
    head = ["command", "measured", "commit", "machine", "other work just before", "versions"]
    training = results["train"]
    commits = sorted({run["commit"] for row in training["rows"].values() for run in row["runs"]})
    minutes, count = training["settings"]["train_minutes"], sum(len(row["runs"]) for row in training["rows"].values())
    return (
        _table(head, rows, numbers=0) + f"\nThe {count} runs themselves took {minutes} minutes together, at commits "
        f"{', '.join(f'`{commit}`' for commit in commits)}.\n"
    )


PARTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "settings": _settings,
    "overview": _overview,
    "compared": _compared,
    "speeds": _speeds,
    "kernels": _kernels,
    "where": _where,
}


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _spread(figure: Mapping[str, Any], form: str) -> str:
    return f"{figure['median']:{form}} ({figure['min']:{form}}–{figure['max']:{form}})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int) -> str:
    """Return a Markdown table with the last `numbers` columns right-aligned."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows)) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check page and picture. Return the exit code: 0; 1 if one differs; 2 if results are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.docgen.attention_page", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/attention.md")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE", help="default: docs/attention.png")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if page or picture differs")
    arguments = parser.parse_args(argv)
    try:
        results = json.loads(arguments.results.read_text(encoding="utf-8"))
        old = arguments.page.read_text(encoding="utf-8")
        new = render(old, results)
    except KeyError as error:
        print(
            f"{parser.prog}: {arguments.results} lacks {error}: run python -m loadtest.inprocess.bench_attention",
            file=sys.stderr,
        )
        return 2
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if arguments.check:
        if old == new and shows(arguments.picture, results["train"]["rows"]):
            return 0
        print(f"page or picture does not match {arguments.results}; run {parser.prog}", file=sys.stderr)
        return 1
    arguments.page.write_text(new, encoding="utf-8")
    draw(arguments.picture, results["train"])
    print(arguments.page, arguments.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
