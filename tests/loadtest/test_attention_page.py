"""docs/attention.md: measured parts from JSON alone, noise said to be noise, and equal to what the repository holds."""

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen import attention_page
from loadtest.inprocess.attention_mechanisms import ROWS
from loadtest.inprocess.seed_noise import Difference, differences, mean_loss, seed_spread
from service.cli import main
from tests.loadtest.attention_results import RESULTS, row

EMPTY = "# By hand\n" + "".join(f"\n<!-- measured: {name} -->\nold\n<!-- end -->\n" for name in attention_page.PARTS)


def test_measured_parts_are_replaced_and_prose_is_kept() -> None:
    page = attention_page.render(EMPTY, RESULTS)
    assert page.startswith("# By hand\n")
    assert "\nold\n" not in page
    assert attention_page.render(page, RESULTS) == page
    assert "| the baseline | – | 1,000,000 | 3.010 | 10,000 | 1,000 | 4,096 |" in page
    assert "| simple average | of learned: `attention=average` | 1,000,000 | 3.910 | 12,000 | 1,200 | 4,096 |" in page
    assert "| the baseline, attention written out | 8,000 (7,200–8,800) | 0.80 (0.72–0.88) | 800 (720–880) |" in page
    assert "| 2,048 | 64.0 MiB | 60.00 (54.00–66.00) | 20.00 (18.00–22.00) | 3.0 (2.7–3.3) |" in page
    assert "600 steps of 8 x 256 tokens (1.2 million)" in page
    assert "seeds 1, 2, bfloat16" in page
    assert f"| `{RESULTS['train']['command']}` | 2026-01-02 03:04 UTC | `fedcba` |" in page


def test_a_difference_counts_where_it_is_larger_than_its_error() -> None:
    """Differences by seed: learned 0.2, 0.2; average 0.7, 0.7; alibi 0.01, -0.03, whose deviation the three share."""
    found = differences(RESULTS["train"]["rows"])
    error = 2 * (2 * 0.02**2 / 3) ** 0.5 / 2**0.5
    assert {name: round(difference.mean, 6) for name, difference in found.items()} == {
        "learned": 0.2,
        "average": 0.7,
        "alibi": -0.01,
    }
    assert all(difference.error == pytest.approx(error) for difference in found.values())
    assert {name: difference.verdict for name, difference in found.items()} == {
        "learned": "worse",
        "average": "worse",
        "alibi": "within the noise",
    }
    assert Difference(-0.3, 0.1).verdict == "better"
    assert seed_spread(RESULTS["train"]["rows"]) == pytest.approx((4 * 2 * 0.01**2 / 4) ** 0.5)
    page = attention_page.render(EMPTY, RESULTS)
    assert f"| linear biases | 3.010 | 2.990 | the baseline | -0.010 ± {error:.3f} | within the noise |" in page


def test_one_seed_tells_nothing_of_the_noise() -> None:
    one: Any = copy.deepcopy(RESULTS)
    one["train"]["settings"]["seeds"] = [1]
    for name, loss in (("multi-head", 3.0), ("learned", 3.2), ("average", 3.9), ("alibi", 3.01)):
        one["train"]["rows"][name]["runs"] = row("", [loss])["runs"]
    page = attention_page.render(EMPTY, one)
    assert "| the baseline | +0.200 | one seed: not known |" in page
    assert "nothing is known of the noise" in page


def test_writing_and_checking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page, picture = (tmp_path / name for name in ("attention.json", "page.md", "picture.png"))
    given = ["--results", str(results), "--page", str(page), "--picture", str(picture)]
    assert attention_page.main(given) == 2
    results.write_text(json.dumps(RESULTS))
    page.write_text("no parts")
    assert attention_page.main(given) == 2
    assert "must have each of these parts once" in capsys.readouterr().err
    page.write_text(EMPTY)
    assert attention_page.main([*given, "--check"]) == 1
    assert attention_page.main(given) == 0
    assert attention_page.main([*given, "--check"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_old_picture_or_a_changed_figure_is_found_out(tmp_path: Path) -> None:
    results, page, picture = (tmp_path / name for name in ("attention.json", "page.md", "picture.png"))
    given = ["--results", str(results), "--page", str(page), "--picture", str(picture)]
    results.write_text(json.dumps(RESULTS))
    page.write_text(EMPTY)
    assert attention_page.main(given) == 0
    good, drawn = page.read_text(), picture.read_bytes()
    page.write_text(good.replace("10,000", "99,000"))
    assert attention_page.main([*given, "--check"]) == 1
    page.write_text(good.replace("# By hand", "# By another hand"))
    assert attention_page.main([*given, "--check"]) == 0
    newer: Any = copy.deepcopy(RESULTS)
    newer["train"]["rows"]["alibi"]["runs"][0]["curve"][0][1] = 9.0
    results.write_text(json.dumps(newer))
    assert attention_page.main(given) == 0
    picture.write_bytes(drawn)
    assert attention_page.main([*given, "--check"]) == 1


def test_a_phase_that_has_not_run_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "attention.json").write_text(json.dumps({"kind": "attention", "train": RESULTS["train"]}))
    (tmp_path / "page.md").write_text(EMPTY)
    given = ["--results", str(tmp_path / "attention.json"), "--page", str(tmp_path / "page.md")]
    assert attention_page.main(given) == 2
    assert "attention.json lacks 'speed': run python -m loadtest.inprocess.bench_attention" in capsys.readouterr().err


def test_the_repository_s_page_is_what_its_results_say() -> None:
    assert attention_page.main(["--check"]) == 0


def test_the_repository_s_results_are_of_the_recipes_it_has() -> None:
    results = json.loads(attention_page.RESULTS.read_text())["train"]
    assert list(results["rows"]) == [row.name for row in ROWS]
    for recipe_row in ROWS:
        measured, config = results["rows"][recipe_row.name], recipe_row.recipe()
        assert measured["changes"] == recipe_row.changes()
        assert measured["parameters"] == config.model.num_parameters
        assert measured["kv_bytes_per_token"] == config.model.kv_bytes_per_token(4)
        assert results["settings"]["steps"] == config.steps


def test_the_page_shows_every_recipe() -> None:
    page = attention_page.PAGE.read_text()
    for recipe_row in ROWS:
        assert f"{recipe_row.name}.toml" in page or recipe_row.title in page


def page_commands() -> list[str]:
    """The page's `kvasir inspect` commands, continuation lines joined."""
    joined = attention_page.PAGE.read_text().replace("\\\n", "")
    return re.findall(r"^\$ \.venv/bin/kvasir (inspect .*)", joined, re.M)


@pytest.mark.parametrize("command", page_commands())
def test_its_commands_run(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(attention_page.ROOT)
    assert main.main(shlex.split(command)) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_its_argument_for_the_scale_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", attention_page.PAGE.read_text(), re.M | re.S)
    exec(compile(code, "attention.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    figures = [tuple(map(float, re.findall(r"(\d+\.\d+)", line))) for line in printed]
    assert len(figures) == 8
    assert figures[0] == pytest.approx((8, 0.43), rel=0.1)
    assert figures[6] == pytest.approx((500, 0.93), rel=0.03)
    for scaled in figures[1::2]:
        assert scaled == pytest.approx((1, 0.12), rel=0.1)


def test_its_links_lead_somewhere() -> None:
    page = attention_page.PAGE.read_text()
    files = {link for link in re.findall(r"\]\(([^)#]+)\)", page) if "://" not in link}
    assert len(files) > 15
    assert [link for link in sorted(files) if not (attention_page.PAGE.parent / link).exists()] == []
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in re.findall(r"^#+ (.*)", page, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= headings


# What docs/attention.md says of the rows by hand, in "What the table shows": better or worse than the row's other, or
# no verdict where it says that little or nothing is told.
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


@pytest.mark.parametrize("name", SAID)
def test_the_prose_says_what_was_measured(name: str) -> None:
    rows = json.loads(attention_page.RESULTS.read_text())["train"]["rows"]
    assert differences(rows)[name].verdict == SAID[name]


def test_the_prose_s_other_comparisons_hold() -> None:
    results = json.loads(attention_page.RESULTS.read_text())
    rows, speed = results["train"]["rows"], results["speed"]
    loss = {name: mean_loss(row) for name, row in rows.items()}
    error = differences(rows)["none"].error
    assert error is not None
    told_well = ("multi-head", "partial-rotary", "relative-bias", "alibi", "disentangled", "sinusoidal-scaled")
    assert max(loss[name] for name in told_well) + 0.2 < min(loss[n] for n in ("learned", "sinusoidal", "none"))
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
