"""Table of every family's parity with the transformers library, from the results of this run's tests.

A test of parity calls `prove`. `make test` prints the table at its end. `make families` runs the checks of all
families, prints the table, and writes model/huggingface/family_proofs.json.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date

from model.huggingface.families.table import FAMILIES, PROOFS_FILE
from model.io.files import read_json

# Name of each check, and what equals the transformers library's results.
CHECKS = {
    "logprobs": "logits of whole texts and of a cache filled in chunks",
    "greedy": "64 greedy ids",
    "batched": "the same ids in a batch with other prompts",
    "prefix": "the same ids after a hit in the prefix cache",
    "int8": "with int8 matrices, logits near those of floats, and greedy ids that are the same alone and batched",
    "GGUF": "logits of a GGUF file",
    "HTTP": "64 greedy ids and their logprobs over HTTP",
}
_PROPERTY = "parity"

Record = Callable[[str, object], None]
Outcome = tuple[str, str, bool]  # family, check, passed


def prove(record_property: Record, family: str, *checks: str) -> None:
    """Record, for the table, that the calling test checks a family. record_property: pytest's fixture."""
    assert family in FAMILIES
    assert set(checks) <= set(CHECKS)
    record_property(_PROPERTY, [family, *checks])


def outcomes(reports: Iterable[tuple[list[tuple[str, object]], bool]]) -> dict[tuple[str, str], bool]:
    """Return whether every test of a family's check passed. reports: properties of each test, and whether it passed."""
    found: dict[tuple[str, str], bool] = {}
    for properties, passed in reports:
        for name, value in properties:
            if name == _PROPERTY and isinstance(value, list):
                family, *checks = value
                for check in checks:
                    found[family, check] = found.get((family, check), True) and passed
    return found


def table(found: dict[tuple[str, str], bool]) -> Iterator[str]:
    """Yield the lines of the table. A check that did not run shows the date of its last proof, if it has one."""
    proofs = read_json(PROOFS_FILE)

    def cell(family: str, check: str) -> str:
        if (family, check) in found:
            return "passed" if found[family, check] else "FAILED"
        return proofs.get(family, {}).get(check, "-")

    yield f"{'':<18}" + "".join(f"{check:<12}" for check in CHECKS).rstrip()
    for family in FAMILIES:
        yield f"{family:<18}" + "".join(f"{cell(family, check):<12}" for check in CHECKS).rstrip()


def updated(proofs: Mapping[str, Mapping[str, str]], found: dict[tuple[str, str], bool]) -> dict[str, dict[str, str]]:
    """Return proofs with today's date for each check that passed, and without those that failed."""
    today = date.today().isoformat()
    now = {family: {check: today for check in CHECKS if found.get((family, check))} for family in FAMILIES}
    return {
        family: {
            check: day
            for check in CHECKS
            if (day := now[family].get(check) or proofs.get(family, {}).get(check)) and found.get((family, check), True)
        }
        for family in sorted(FAMILIES)
    }
