"""Path of a request through Kvasir's functions: short, and drawn as it is in docs/design.md.

`python -m tests.e2e.test_request_path` measures the path and rewrites the table of docs/design.md.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.design_map import ROOT
from tests.e2e.process import serving, serving_anew

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "design.md"
CHECKPOINT = ROOT / "checkpoints" / "kvasir-20m"
PROMPT = "The clever fox met an old owl in the forest, and he asked her for"
BEGIN, END = "<!-- path: python -m tests.e2e.test_request_path -->\n", "<!-- end of path -->\n"
MAX_FUNCTIONS_IN, MAX_FUNCTIONS_OUT = 35, 18


@dataclass(frozen=True, slots=True)
class Hop:
    """One function on the path: direction, process id, thread, function, and the representation that it receives."""

    direction: str
    process: str
    thread: str
    function: str
    kind: str


def measure_path(directory: Path) -> list[Hop]:
    """Return the functions that receive the prompt's ids before the model runs, then those of the sampled token."""
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    with serving(CHECKPOINT, directory) as service:
        (choice,) = service.complete(**request)["choices"]
    probe = {
        "out": str(directory / "path"),
        "root": str(ROOT),
        "prompt": choice["prompt_token_ids"],
        "token": choice["token_ids"][0],
        "text": choice["text"],
    }
    variables = {"PATH_PROBE": json.dumps(probe), "PYTHONPATH": f"{Path(__file__).parent / 'path_probe'}:{ROOT}"}
    with serving_anew(CHECKPOINT, directory, **variables) as service:
        service.post(**request, stream=True)
    hops = [Hop(*line.split()) for line in (directory / "path").read_text().splitlines()]
    return first_calls(until_the_model(hops)) + first_calls(until_written(hops))


def until_the_model(hops: list[Hop]) -> list[Hop]:
    """Return the hops of the prompt's ids up to the model's forward pass."""
    ids = [hop for hop in hops if hop.direction == "in"]
    end = next(i for i, hop in enumerate(ids) if hop.function.startswith(("model/native/", "model/nn/")))
    return ids[: end + 1]


def until_written(hops: list[Hop]) -> list[Hop]:
    """Return the hops of the sampled token, from the sampler to the write of the response."""
    begin = next(i for i, hop in enumerate(hops) if hop.function.startswith(("model/native/", "model/nn/")))
    token = [hop for hop in hops[begin:] if hop.direction == "out"]
    end = max(i for i, hop in enumerate(token) if hop.kind == "bytes")
    return token[: end + 1]


def first_calls(hops: list[Hop]) -> list[Hop]:
    """Return each function's first hop."""
    return list({hop.function: hop for hop in reversed(hops)}.values())[::-1]


def path_table(hops: list[Hop]) -> str:
    """Return the table of docs/design.md: one row a function."""
    rows = [
        f"| {hop.direction} | `{hop.function.partition(':')[0]}` | `{hop.function.partition(':')[2]}` |" for hop in hops
    ]
    return "\n".join(["| way | file | function |", "|---|---|---|", *rows]) + "\n"


@pytest.fixture(scope="module")
def hops(tmp_path_factory: pytest.TempPathFactory) -> list[Hop]:
    return measure_path(tmp_path_factory.mktemp("path"))


def test_a_request_passes_few_functions(hops: list[Hop]) -> None:
    assert len([hop for hop in hops if hop.direction == "in"]) <= MAX_FUNCTIONS_IN
    assert len([hop for hop in hops if hop.direction == "out"]) <= MAX_FUNCTIONS_OUT


def test_a_prompt_passes_two_processes_with_one_thread_each(hops: list[Hop]) -> None:
    prompt_hops = [hop for hop in hops if hop.direction == "in"]
    assert len({hop.process for hop in prompt_hops}) == 2
    assert len({(hop.process, hop.thread) for hop in prompt_hops}) == 2


def test_a_sampled_token_passes_the_carrier_thread_too(hops: list[Hop]) -> None:
    """Without this thread, sending delays the next step: 0.92 of the tokens/s at 16 streams, 0.94 at 64."""
    token_hops = [hop for hop in hops if hop.direction == "out"]
    assert len({hop.process for hop in token_hops}) == 2
    assert sorted({hop.thread for hop in token_hops}) == ["MainThread", "carrier"]


def test_the_design_page_draws_the_path(hops: list[Hop]) -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == path_table(hops), "run python -m tests.e2e.test_request_path"


def main() -> None:
    """Measure the path and rewrite the table in docs/design.md."""
    with tempfile.TemporaryDirectory() as directory:
        hops = measure_path(Path(directory))
    sys.stdout.write("".join(f"{hop.direction} {hop.thread} {hop.function} {hop.kind}\n" for hop in hops))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + path_table(hops) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
