"""Texts and figures in README.md and docs/ that come from the weights of the shipped model.

`python -m tests.shipped_pages` runs the commands of these pages and rewrites what they print, for example after the
model was trained again. Sampled texts depend on the processor's instruction set, so no test compares them.
"""

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.checkpoint.conversion.export_hugging_face import export_checkpoint
from model.checkpoint.manifest import read_manifest
from tests.e2e.process import Service, serving_anew
from tests.test_readme import CHECKPOINT, ROOT, URL, shell

_GENERATE = ".venv/bin/kvasir generate --checkpoint "
RUN = ("curl ", f"{_GENERATE}checkpoints/kvasir-20m ", f"{_GENERATE}runs/kvasir-hf ", ".venv/bin/kvasir eval ")
INSPECT = ".venv/bin/kvasir inspect attention "
_COMMAND = re.compile(r"^\$ (?P<command>(?:.*\\\n)*.*[^\\\n])\n(?P<output>(?:(?!\$ |```).*\n)+)", re.M)
_PAGES = ("README.md", "docs/api.md", "docs/evaluation.md", "docs/inspect.md")
_SKIPPED = "…"


def fit(shown: str, printed: str) -> str:
    """Return a command's new output as its page shows it: with as many lines, and with equal folds of JSON.

    A line of the page with "…" stands for lines left out. Lines before the first of them come from the beginning, lines
    after the last one from the end, and others from the lines with their first words.
    """
    lines, old = [line.rstrip() for line in printed.rstrip("\n").split("\n")], shown.rstrip("\n").split("\n")
    if _SKIPPED not in old:
        for line in old[1:]:
            if key := re.match(r' ("\w+":)', line):
                lines[-1:] = lines[-1].replace(f",{key[1]}", f",\n {key[1]}", 1).split("\n")
        return "\n".join(lines) + "\n"
    begin, end = old.index(_SKIPPED), len(old) - 1 - old[::-1].index(_SKIPPED)
    first_words = {line.split()[0]: line for line in lines if line.strip()}
    middle = [line if line == _SKIPPED else first_words[line.split()[0]] for line in old[begin:end]]
    fitted = [*lines[:begin], *middle, _SKIPPED, *lines[len(lines) - (len(old) - 1 - end) :]]
    return "\n".join(fitted) + "\n"


def renew_commands(page: str, run: Callable[[str], str]) -> str:
    """Return a page with new output of those commands whose output depends on the weights."""

    def renewed(match: re.Match[str]) -> str:
        if not match["command"].startswith((*RUN, INSPECT)):
            return match[0]
        return f"$ {match['command']}\n{fit(match['output'], run(match['command']))}"

    return _COMMAND.sub(renewed, page)


def renew_examples(page: str, url: str) -> str:
    """Return README.md with the texts that its Python examples print."""
    for code, before in re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.M | re.S):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code.replace(URL, url), "README.md", "exec"), {})
        folded = "\n".join(textwrap.fill(line, 120) for line in printed.getvalue().strip().split("\n"))
        page = page.replace(f"{code}```\n\n```text\n{before}", f"{code}```\n\n```text\n{folded}\n")
    return page


def renew_facts(page: str, training: dict[str, Any]) -> str:
    """Return README.md with the number, duration and tokens of all runs, and the losses of the last one."""
    runs = [training]
    while "started_from" in runs[-1]:
        runs.append(runs[-1]["started_from"])
    minutes = round(sum(run["seconds"] for run in runs) / 60)
    num_runs = sum(run["steps"] > 1 for run in runs)  # a step alone only averages weights
    steps = f"{num_runs} runs with {minutes // 60} h {minutes % 60} min"
    page = _replace(r"(?<=from scratch, in ).*(?= of steps on one or two threads)", steps, page)
    tokens = f"{sum(run['tokens'] for run in runs) / 1e6:.1f}"
    page = _replace(r"(?<=They read )[\d.]+(?= million tokens)", tokens, page)
    bits = training["held_out_bits_per_byte"]
    stories, articles = (f"{bits[name]:.2f}" for name in ("tinystories-valid", "simplewiki"))
    page = _replace(r"[\d.]+(?= bits per byte\s+on held-out TinyStories)", stories, page)
    return _replace(r"[\d.]+(?= on the Simple English)", articles, page)


def renew_chat(page: str, url: str) -> str:
    """Return docs/clients.md with a new conversation of `kvasir chat`. What the user writes stays the same."""
    (command, shown) = re.findall(r"^\$ \.venv/bin/kvasir (chat [^\n]*)\n(.*?)^```", page, re.M | re.S)[0]
    written = re.findall(r"^> (.*)$", shown, re.M)
    terminal, other = os.openpty()
    os.write(terminal, "".join(f"{line}\n" for line in written).encode() + b"\x04")
    argv = [sys.executable, "-u", "-m", "service.cli", *command.split(), "--url", url]
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    said = subprocess.run(argv, cwd=ROOT, stdin=other, **outputs, text=True, check=True).stdout
    os.close(terminal)
    os.close(other)
    first, *answers = said.replace(url, URL).split("\n> ")
    told = [f"{line}\n{answer}" for line, answer in zip(written, answers, strict=False)]
    return page.replace(shown, "\n> ".join([first, *told]).rstrip("\n> ") + "\n")


def renew_quantization(page: str, evaluate: Callable[..., dict[str, Any]]) -> str:
    """Return docs/quantization.md with the cost in accuracy of int8 and int4 matrices, and of a float16 KV-cache."""
    found = {kind: evaluate(60, "--quantize", kind) for kind in ("int8", "int4")}
    for name in ("tinystories", "aesop"):
        plain = found["int8"]["without_rounding"][name]["bits_per_byte"]
        cells = [f"{plain:.4f}"]
        for result in found.values():
            bits = result["held_out"][name]["bits_per_byte"]
            cells.append(f"{bits:.4f} ({100 * (bits / plain - 1):+.2f} %)")
        page = _replace(rf"(?<=\({name}\) \| ).*(?= \|)", " | ".join(cells), page)
    cached = evaluate(100, "--kv-cache-dtype", "float16")
    changes = [
        cached["held_out"][name]["bits_per_byte"] / cached["without_rounding"][name]["bits_per_byte"] - 1
        for name in ("tinystories", "aesop")
    ]
    change = round(100 * max(changes, key=abs), 2) + 0.0  # + 0.0: no negative zero
    return _replace(r"(?<=It costs the shipped model )[+-][\d.]+(?= % of the bits)", f"{change:+.2f}", page)


def renew_harness(page: str, evaluate: Callable[..., dict[str, Any]], documents: Path) -> str:
    """Return docs/evaluation.md with the bits per byte of lm-evaluation-harness beside those of `kvasir eval`."""
    result = evaluate(50, "--documents", str(documents))
    rows = [json.loads(line) for line in documents.read_text().splitlines()]
    theirs, ours = [], []
    for name in ("aesop", "tinystories"):
        nats = -sum(row["loglikelihood_rolling"] for row in rows if row["split"] == name)
        theirs.append(f"{nats / math.log(2) / result['held_out'][name]['bytes']:.4f}")
        ours.append(f"{result['held_out'][name]['bits_per_byte']:.4f}")
    figures = f"(above: {' and '.join(theirs)} where `kvasir eval` has {' and '.join(ours)})"
    return _replace(r"\(above: [\d.]+ and [\d.]+ where `kvasir eval` has [\d.]+ and [\d.]+\)", figures, page)


def renew_heads(page: str, run: Callable[[str], str]) -> str:
    """Return docs/inspect.md with what ` it` attends to in its example, and redraw docs/heads.png."""
    command = f'{INSPECT}--checkpoint checkpoints/kvasir-20m --layer %d --head %s --prompt "%s"'
    prompt = "The dog did not cross the road as it was too tired."

    def row_of_it(layer: int, head: str, prompt: str) -> str:
        return re.findall(r"^ +\d+  ␣it .*$", run(command % (layer, head, prompt)), re.M)[0]

    page = _replace(r"^ +9  ␣it .*(?=\n```$)", row_of_it(6, "all --out docs/heads.png", prompt), page)
    first = re.findall(r"<\|endoftext\|> (\d+) %", row_of_it(7, "1", prompt))[0]
    page = _replace(r"(?<=head 1 of layer 7 with )\d+(?= %)", first, page)
    for row in re.findall(r"^\| (The .*\.) \| `", page, re.M):
        token, share = re.findall(r"␣it +(\S+) (\d+ %)", row_of_it(6, "1", row))[0]
        token = token.replace("|", "\\|")  # of a table, even within a code span
        page = _replace(rf"(?<=^\| {re.escape(row)} \| ).*(?= \|$)", f"`{token}` {share}", page)
    return page


def _replace(pattern: str, text: str, page: str) -> str:
    page, count = re.subn(pattern, lambda _: text, page, flags=re.M)
    assert count == 1, f"{count} places for {pattern}"
    return page


def main() -> None:
    """Rewrite the pages in this checkout."""
    with tempfile.TemporaryDirectory() as name, serving_anew(CHECKPOINT, Path(name)) as service:
        renew(service, Path(name))


def renew(service: Service, directory: Path) -> None:
    exported = directory / "kvasir-hf"
    export_checkpoint(CHECKPOINT, exported)

    def run(command: str) -> str:
        sys.stderr.write(f"$ {command}\n")
        return shell(command.replace("runs/kvasir-hf", str(exported)), service.url)

    def evaluate(most: int, *flags: str) -> dict[str, Any]:
        texts = "--texts tinystories=tests/data/tinystories_valid.jsonl.xz --texts aesop=tests/data/aesop.txt"
        out = directory / "evaluation.json"
        command = f".venv/bin/kvasir eval --checkpoint checkpoints/kvasir-20m --device cpu {texts}"
        run(f"{command} --max-documents {most} --samples 0 --out {out} {' '.join(flags)}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    further: dict[str, Callable[[str], str]] = {
        "README.md": lambda page: _replace(
            r"(?<=level `)\w+(?=`)",
            service.get("/ready").json()["level"],
            renew_facts(renew_examples(page, service.url), read_manifest(CHECKPOINT).training),
        ),
        "docs/clients.md": lambda page: renew_chat(page, service.url),
        "docs/evaluation.md": lambda page: renew_harness(page, evaluate, directory / "documents.jsonl"),
        "docs/inspect.md": lambda page: renew_heads(page, run),
        "docs/quantization.md": lambda page: renew_quantization(page, evaluate),
    }
    for name in dict.fromkeys([*_PAGES, *further]):
        path = ROOT / name
        page = path.read_text()
        page = renew_commands(page, run) if name in _PAGES else page
        page = further.get(name, str)(page)
        path.write_text(page)


if __name__ == "__main__":
    main()
