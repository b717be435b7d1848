"""docs/attention.md: its measured parts are generated from JSON results and match those in the repository."""

import copy
import json
import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen import pages
from loadtest.docgen.pages import DOCS, attention_page, differences, losses
from loadtest.inprocess.bench_attention import ROWS
from service.cli import main

REPOSITORY: dict[str, Any] = json.loads((pages.RESULTS / "attention.json").read_text())
PAGE = (DOCS / "attention.md").read_text()
PARTS = ("settings", "overview", "compared", "speeds", "kernels", "where")
EMPTY = "# By hand\n" + "".join(f"\n<!-- measured: {name} -->\nold\n<!-- end -->\n" for name in PARTS)


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median, "values": [median]}


def trained_row(title: str, losses: list[float], compared_with: str = "multi-head", **changes: Any) -> dict[str, Any]:
    """Return a trained row with one run per loss, from seed 1 on."""
    runs = [
        {
            "seed": seed,
            "nats_per_token": loss,
            "train_seconds": 60.0,
            "commit": "abcdef",
            "curve": [[100, loss + 1], [200, loss + 0.5], [300, loss]],
        }
        for seed, loss in enumerate(losses, start=1)
    ]
    return {
        "title": title,
        "compared_with": compared_with,
        "changes": changes,
        "parameters": 1_000_000,
        "kv_bytes_per_token": 4096,
        "runs": runs,
    }


def speeds(trained: float, served: float) -> dict[str, Any]:
    return {
        "trained_tokens_per_second": spread(trained),
        "trained_ratio": spread(trained / 10_000),
        "served_tokens_per_second": spread(served),
        "served_ratio": spread(served / 1_000),
    }


FACTS: dict[str, Any] = {
    "date": "2026-01-02 03:04 UTC",
    "commit": "fedcba",
    "machine": {"processor": "Abacus", "cores": 2, "memory_gib": 24.0, "system": "Linux"},
    "other_work_cores": 0.04,
    "took_seconds": 123.4,
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
}
RESULTS: dict[str, Any] = {
    "kind": "attention",
    "train": FACTS
    | {
        "command": "python -m loadtest.inprocess.bench_attention train --seeds 1 2",
        "settings": {
            "seeds": [1, 2],
            "steps": 600,
            "batch_size": 8,
            "sequence_length": 256,
            "vocab_size": 2048,
            "precision": ["bfloat16"],
            "train_minutes": 8,
        },
        "rows": {
            "multi-head": trained_row("the baseline", [3.0, 3.02]),
            "learned": trained_row("learned positions", [3.2, 3.22], position="learned"),
            "average": trained_row("simple average", [3.9, 3.92], "learned", attention="average"),
            "alibi": trained_row("linear biases", [3.01, 2.99], position="alibi"),
        },
    },
    "speed": FACTS
    | {
        "command": "python -m loadtest.inprocess.bench_attention speed",
        "settings": {
            "rounds": 7,
            "threads": 1,
            "train_steps": 8,
            "train_precision": "bfloat16",
            "streams": 16,
            "prompt_tokens": 64,
            "output_tokens": 64,
            "serve_dtype": "float32",
        },
        "rows": {
            "multi-head": speeds(10_000, 1_000),
            "learned": speeds(11_000, 1_100),
            "average": speeds(12_000, 1_200),
            "alibi": speeds(9_000, 900),
            "eager": speeds(8_000, 800),
        },
        "kernels": [
            {
                "length": 2048,
                "score_bytes": 67_108_864,
                "eager_ms": spread(60.0),
                "fused_ms": spread(20.0),
                "ratio": spread(3.0),
            }
        ],
    },
}


def test_measured_parts_are_replaced_and_prose_is_kept() -> None:
    page = attention_page(EMPTY, RESULTS)
    assert page.startswith("# By hand\n")
    assert "\nold\n" not in page
    assert attention_page(page, RESULTS) == page
    assert "| the baseline | – | 1,000,000 | 3.010 | 10,000 | 1,000 | 4,096 |" in page
    assert "| simple average | of learned: `attention=average` | 1,000,000 | 3.910 | 12,000 | 1,200 | 4,096 |" in page
    assert "| the baseline with unfused attention | 8,000 (7,200–8,800) | 0.80 (0.72–0.88) | 800 (720–880) |" in page
    assert "| 2,048 | 64.0 MiB | 60.00 (54.00–66.00) | 20.00 (18.00–22.00) | 3.0 (2.7–3.3) |" in page
    assert "600 steps of 8 x 256 tokens (1.2 million)" in page
    assert "seeds 1, 2, bfloat16" in page
    assert f"| `{RESULTS['train']['command']}` | 2026-01-02 03:04 UTC | `fedcba` |" in page


def test_a_difference_counts_only_beyond_its_error() -> None:
    """Differences by seed: learned 0.2, 0.2; average 0.7, 0.7; alibi 0.01, -0.03. All share one deviation."""
    found = differences(RESULTS["train"]["rows"])
    error = 2 * (2 * 0.02**2 / 3) ** 0.5 / 2**0.5
    assert {name: (round(difference["mean"], 6), difference["verdict"]) for name, difference in found.items()} == {
        "learned": (0.2, "worse"),
        "average": (0.7, "worse"),
        "alibi": (-0.01, "within the noise"),
    }
    assert all(difference["error"] == pytest.approx(error) for difference in found.values())
    page = attention_page(EMPTY, RESULTS)
    assert f"| linear biases | 3.010 / 2.990 | the baseline | -0.010 ± {error:.3f} | within the noise |" in page
    assert f"vary by {(4 * 2 * 0.01**2 / 4) ** 0.5:.3f} between seeds (standard deviation" in page


def test_page_and_picture_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page, picture = (tmp_path / name for name in ("attention.json", "attention.md", "attention.png"))
    options = ["attention", "--results", str(tmp_path), "--docs", str(tmp_path)]
    assert pages.main(options) == 2
    results.write_text(json.dumps(RESULTS))
    page.write_text("no parts")
    assert pages.main(options) == 2
    assert "must have each measured part once" in capsys.readouterr().err
    page.write_text(EMPTY)
    assert pages.main([*options, "--check"]) == 1
    assert pages.main(options) == 0
    assert pages.main([*options, "--check"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    written, drawn = page.read_text(), picture.read_bytes()
    page.write_text(written.replace("10,000", "99,000"))
    assert pages.main([*options, "--check"]) == 1
    page.write_text(written.replace("# By hand", "# By another hand"))
    assert pages.main([*options, "--check"]) == 0
    newer: Any = copy.deepcopy(RESULTS)
    newer["train"]["rows"]["alibi"]["runs"][0]["curve"][0][1] = 9.0
    results.write_text(json.dumps(newer))
    assert pages.main(options) == 0
    picture.write_bytes(drawn)
    assert pages.main([*options, "--check"]) == 1


def test_missing_results_are_named_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "attention.json", tmp_path / "attention.md"
    options = ["attention", "--results", str(tmp_path), "--docs", str(tmp_path)]
    page.write_text(EMPTY)
    results.write_text(json.dumps({"train": RESULTS["train"]}))
    assert pages.main(options) == 2
    assert "the results lack 'speed'; run the benchmark again" in capsys.readouterr().err
    one_seed: Any = copy.deepcopy(RESULTS)
    one_seed["train"]["settings"]["seeds"] = [1]
    for row in one_seed["train"]["rows"].values():
        del row["runs"][1:]
    results.write_text(json.dumps(one_seed))
    assert pages.main(options) == 2
    assert "the noise between seeds needs at least two seeds; run bench_attention train" in capsys.readouterr().err


def test_the_repositorys_page_matches_its_results() -> None:
    assert pages.main(["attention", "--check"]) == 0


def test_the_repositorys_results_match_its_recipes() -> None:
    page, results = PAGE, REPOSITORY["train"]
    assert list(results["rows"]) == [row.name for row in ROWS]
    for recipe_row in ROWS:
        measured, config = results["rows"][recipe_row.name], recipe_row.recipe()
        assert measured["changes"] == recipe_row.changes()
        assert measured["parameters"] == config.model.num_parameters
        assert measured["kv_bytes_per_token"] == config.model.kv_bytes_per_token(4)
        assert results["settings"]["steps"] == config.steps
        assert f"{recipe_row.name}.toml" in page or recipe_row.title in page


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
