"""docs/attention.md: its tables, its prose and its commands match the results of the study and the recipes."""

import json
import math
import re
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen.pages import DOCS, RESULTS
from loadtest.measurement.benchmark_program import is_picture_of
from model.training.config import load_train_config
from service.cli import main

REPOSITORY: dict[str, Any] = json.loads((RESULTS / "attention.json").read_text())
PAGE = (DOCS / "attention.md").read_text()
RECIPES = Path(__file__).parents[2] / "model" / "training" / "configs" / "attention"


def losses(row: Mapping[str, Any]) -> list[float]:
    """Return the held-out losses of a mechanism, one per seed."""
    return [run["nats_per_token"] for run in row["runs"]]


def differences(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the loss of each mechanism minus that of its baseline, with twice the standard error of all differences.

    Runs of one seed read the same texts in the same order, so losses are subtracted seed by seed. One mechanism has too
    few seeds to estimate an error, so all mechanisms share the deviation within their seeds.
    """
    by_seed = {
        name: [own - other for own, other in zip(losses(row), losses(rows[row["compared_with"]]), strict=True)]
        for name, row in rows.items()
        if row["compared_with"] != name
    }
    deviation = math.sqrt(statistics.fmean(statistics.variance(values) for values in by_seed.values()))
    found = {}
    for name, values in by_seed.items():
        mean, error = statistics.fmean(values), 2.0 * deviation / math.sqrt(len(values))
        verdict = "within the noise" if abs(mean) <= error else "better" if mean < 0 else "worse"
        found[name] = {"mean": mean, "error": error, "verdict": verdict}
    return found


def test_the_tables_have_the_figures_of_the_results() -> None:
    rows, speed = REPOSITORY["train"]["rows"], REPOSITORY["speed"]["rows"]
    found = differences(rows)
    for name, row in rows.items():
        trained, served = (
            f"{speed[name][f'{kind}_tokens_per_second']['median']:,.0f}" for kind in ("trained", "served")
        )
        loss, by_seed = f"{statistics.fmean(losses(row)):.3f}", " / ".join(f"{loss:.3f}" for loss in losses(row))
        tail = f"| {row['parameters']:,} | {loss} | {trained} | {served} | {row['kv_bytes_per_token']:,} |"
        assert re.search(rf"^\| {re.escape(row['title'])} \| .*{re.escape(tail)}$", PAGE, re.M), name
        difference = found.get(name)
        text = "–" if difference is None else f"{difference['mean']:+.3f} ± {difference['error']:.3f}"
        tail = f"| {text} | {'–' if difference is None else difference['verdict']} |"
        assert re.search(rf"^\| {re.escape(row['title'])} \| {by_seed} \| .*{re.escape(tail)}$", PAGE, re.M), name
    assert is_picture_of(DOCS / "attention.png", rows)


def test_the_repositorys_results_match_its_recipes() -> None:
    results = REPOSITORY["train"]
    assert sorted(results["rows"]) == sorted(path.stem for path in RECIPES.glob("*.toml"))
    for name, row in results["rows"].items():
        config, before = (load_train_config(RECIPES / f"{each}.toml") for each in (name, row["compared_with"]))
        other = before.model.to_dict()
        assert row["changes"] == {key: value for key, value in config.model.to_dict().items() if value != other[key]}
        assert row["parameters"] == config.model.num_parameters
        assert row["kv_bytes_per_token"] == config.model.kv_bytes_per_token(4)
        assert results["settings"]["steps"] == config.steps
        assert f"{name}.toml" in PAGE or row["title"] in PAGE


def page_commands() -> list[str]:
    """Return the page's `kvasir inspect` commands, continuation lines joined."""
    joined = PAGE.replace("\\\n", "")
    return re.findall(r"^\$ \.venv/bin/kvasir (inspect .*)", joined, re.M)


@pytest.mark.parametrize("command", page_commands())
def test_commands_of_the_page_run(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DOCS.parent)
    assert main.main(shlex.split(command)) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_the_pages_code_prints_the_figures_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    exec(compile(code, "attention.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    figures = [tuple(map(float, re.findall(r"(\d+\.\d+)", line))) for line in printed]
    assert len(figures) == 8
    assert figures[0] == pytest.approx((8, 0.43), rel=0.1)
    assert figures[6] == pytest.approx((500, 0.93), rel=0.03)
    for scaled in figures[1::2]:
        assert scaled == pytest.approx((1, 0.12), rel=0.1)


def test_links_of_the_page_lead_to_files_and_headings() -> None:
    page = PAGE
    files = {link for link in re.findall(r"\]\(([^)#]+)\)", page) if "://" not in link}
    assert len(files) > 15
    assert [link for link in sorted(files) if not (DOCS / link).exists()] == []
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in re.findall(r"^#+ (.*)", page, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings


# Verdicts of the handwritten section "What the table shows" of docs/attention.md.
SAID = {
    "average": "worse",
    "single-head": "worse",
    "grouped-query": "within the noise",
    "none": "worse",
    "learned": "worse",
    "sinusoidal": "worse",
    "sinusoidal-scaled": "better",
    "scaled-embeddings": "better",
    "relative-bias": "worse",
    "alibi": "better",
    "disentangled": "better",
    "sliding-window": "better",
    "qk-norm": "better",
}


def test_the_verdicts_of_the_prose_match_the_results() -> None:
    found = differences(REPOSITORY["train"]["rows"])
    assert {name: found[name]["verdict"] for name in SAID} == SAID


def test_the_other_comparisons_of_the_prose_match_the_results() -> None:
    rows, speed = REPOSITORY["train"]["rows"], REPOSITORY["speed"]
    loss = {name: statistics.fmean(losses(row)) for name, row in rows.items()}
    error = differences(rows)["none"]["error"]
    ahead = ("multi-head", "partial-rotary", "relative-bias", "alibi", "disentangled", "sinusoidal-scaled")
    assert max(loss[name] for name in ahead) + 0.2 < min(loss[n] for n in ("learned", "sinusoidal", "none"))
    assert loss["sinusoidal"] > loss["none"] - error
    assert abs(loss["sinusoidal-scaled"] - loss["multi-head"]) < error
    assert loss["scaled-embeddings"] < loss["sinusoidal-scaled"] - error
    assert loss["average"] < loss["none"] + error
    for shared in ("multi-query", "partial-rotary"):
        assert 0 < loss[shared] - loss["multi-head"] < 0.05
    parameters = {name: row["parameters"] for name, row in rows.items()}
    assert parameters["multi-query"] == pytest.approx(0.9 * parameters["multi-head"], rel=0.02)
    ratio = {name: {key: row[key]["median"] for key in row if "ratio" in key} for name, row in speed["rows"].items()}
    for name, figure, low, high in (
        ("eager", "served", 0.0, 0.5),
        ("eager", "trained", 0.85, 1.15),
        ("grouped-query", "served", 1.08, 1.5),
        ("multi-query", "served", 1.15, 2.0),
        ("none", "served", 1.02, 1.2),
        ("none", "trained", 1.02, 1.2),
        ("relative-bias", "trained", 0.7, 0.87),
        ("relative-bias", "served", 0.85, 1.1),
        ("disentangled", "trained", 0.4, 0.6),
        ("disentangled", "served", 0.58, 0.75),
    ):
        assert low < ratio[name][f"{figure}_ratio"] < high, (name, figure)
    gaps = [point["ratio"]["median"] for point in speed["kernels"]]
    assert gaps == sorted(gaps)
