"""`tests.shipped_pages` puts new output in the places of the old one, and finds each of these places in the pages."""

import re
from pathlib import Path

import pytest

from tests import shipped_pages
from tests.shipped_pages import RUN, fit, renew_commands, renew_examples, renew_harness, renew_quantization
from tests.test_readme import ROOT


@pytest.mark.parametrize(
    ("shown", "printed", "fitted"),
    [
        ("old\n", "new\nand more\n", "new\nand more\n"),
        ("a 1\n…\nb 1\n\nc 1\n", "a 2\nx 2\ny 2\nb 2\n\nc 2\n\n", "a 2\n…\nb 2\n\nc 2\n"),
        ("…\n  7 x\n  8 x\n…\n", "title\n  6 y\n  7 y\n  8 y\n  9 y\n", "…\n  7 y\n  8 y\n…\n"),
        ("top 1\n…\n", "top 2\nrest\n", "top 2\n…\n"),
        ('{"a":1,\n "b":2,\n "c":3}\n', '{"a":4,"b":"c","x":0,"c":6}\n', '{"a":4,\n "b":"c","x":0,\n "c":6}\n'),
    ],
)
def test_new_output_has_the_lines_and_folds_of_the_old_output(shown: str, printed: str, fitted: str) -> None:
    assert fit(shown, printed) == fitted


def test_commands_that_print_nothing_of_the_weights_stay_as_they_are() -> None:
    page = "```console\n$ curl x \\\n    y\nold\n$ ls\nfiles\n```\n\n```console\n$ curl z\n```\ntext\n"
    assert renew_commands(page, lambda command: f"output of {command[-1]}") == page.replace("old", "output of y")


def test_the_texts_of_the_python_examples_are_renewed() -> None:
    example = '```python\nprint("%s http://127.0.0.1:8000 " * 9)\n```\n\n```text\nold\n```\n'
    page = renew_examples(example % "a" + example % "b", "here")
    assert re.findall(r"```text\n(.*?)\n```", page, re.S) == [" ".join(["a here"] * 9), " ".join(["b here"] * 9)]


def test_figures_of_the_pages_are_replaced(tmp_path: Path) -> None:
    def evaluate(most: int, *flags: str) -> dict[str, object]:
        (tmp_path / "documents.jsonl").write_text(
            '{"split": "aesop", "loglikelihood_rolling": -6.931471805599453}\n'
            '{"split": "tinystories", "loglikelihood_rolling": -3.4657359027997265}\n'
        )
        bits = {name: {"bits_per_byte": 2.0, "bytes": 5} for name in ("aesop", "tinystories")}
        rounded = {name: {"bits_per_byte": 2.1 if "int4" in flags else 2.0002, "bytes": 5} for name in bits}
        return {"held_out": rounded if most > 50 else bits, "without_rounding": bits}

    page = renew_quantization((ROOT / "docs" / "quantization.md").read_text(), evaluate)
    for name in ("stories (tinystories)", "fables (aesop)"):
        assert f"| {name} | 2.0000 | 2.0002 (+0.01 %) | 2.1000 (+5.00 %) |" in page
    assert "It costs the shipped model +0.01 % of the bits per byte of both texts." in page
    page = renew_harness((ROOT / "docs" / "evaluation.md").read_text(), evaluate, tmp_path / "documents.jsonl")
    assert "(above: 2.0000 and 1.0000 where `kvasir eval` has 2.0000 and 2.0000)" in page


def test_the_facts_of_the_run_are_in_the_readme() -> None:
    bits = {"tinystories-valid": 0.5, "simplewiki": 1.25}
    first = {"steps": 200, "seconds": 60.0, "tokens": 1_000_000}
    mean = {"steps": 1, "seconds": 0.0, "tokens": 0, "started_from": first}
    second = {"steps": 100, "seconds": 3600.0, "tokens": 500_000, "started_from": mean}
    training = {"steps": 400, "seconds": 7500.0, "tokens": 2_340_000, "started_from": second} | {
        "held_out_bits_per_byte": bits
    }
    words = " ".join(shipped_pages.renew_facts((ROOT / "README.md").read_text(), training).split())
    assert "in 3 runs with 3 h 6 min of steps on one or two threads" in words
    assert "They read 3.8 million tokens of" in words
    assert "reaches 0.50 bits per byte on held-out TinyStories, 1.25 on the Simple English" in words


def test_what_it_attends_to_is_renewed_in_every_place() -> None:
    seen = []

    def run(command: str) -> str:
        seen.append(command)
        return "title\n    9  ␣it     <|endoftext|> 12 %, ␣dog 1 %\n   10  ␣was    ␣it 2 %\n"

    page = shipped_pages.renew_heads((ROOT / "docs" / "inspect.md").read_text(), run)
    assert page.count(r"| `<\|endoftext\|>` 12 % |") == 4
    assert "head 1 of layer 7 with 12 %." in page
    assert "prints:\n\n```\n    9  ␣it     <|endoftext|> 12 %, ␣dog 1 %\n```" in page
    assert sum("--head all --out docs/heads.png" in command for command in seen) == 1


def test_the_pages_have_output_to_renew() -> None:
    found = []
    for name in ("README.md", "docs/api.md", "docs/evaluation.md", "docs/inspect.md"):
        renew_commands((ROOT / name).read_text(), lambda command: found.append(command) or "a\n7\n8\n9\n10\n")  # type: ignore[func-returns-value]
    assert len(found) == 8
    assert sum(command.startswith(RUN) for command in found) == 7
