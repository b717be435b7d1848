"""Default checkpoint of the commands: the shipped model."""

from pathlib import Path

from model.checkpoint.manifest import MANIFEST_FILE

SHIPPED_CHECKPOINT = Path("checkpoints") / "kvasir-9m"
# Parent directory of `service`; the repository, if the package is installed in editable mode.
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def find_default_checkpoint() -> Path | None:
    """Return the shipped model's directory below the working directory, else beside the package; None if missing."""
    places = (SHIPPED_CHECKPOINT, _PACKAGE_ROOT / SHIPPED_CHECKPOINT)
    return next((path for path in places if (path / MANIFEST_FILE).is_file()), None)
