"""Dates at which tests last proved a family's parity with the transformers library: family_proofs.json.

`make families` writes the file after its tests. A test keeps the file's families equal to those of the table.
"""

from collections.abc import Mapping
from pathlib import Path

from model.io.files import read_json, write_json

PROOFS_FILE = Path(__file__).parent / "family_proofs.json"
Proofs = Mapping[str, Mapping[str, str]]  # by `model_type`: date, as in 2026-11-28, of the last run of each check


def read_proofs(path: Path = PROOFS_FILE) -> Proofs:
    """Return the date on which each check was passed, by `model_type` and check.

    Raises CheckpointError for a missing or bad file.
    """
    return read_json(path)


def write_proofs(proofs: Proofs, path: Path = PROOFS_FILE) -> None:
    """Write the dates of passed checks, sorted by the families' names."""
    write_json(path, dict(sorted(proofs.items())))
