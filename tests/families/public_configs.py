"""Published config.json files, read from tests/data/published_configs.json.

Each entry has the model's name and address (null: the copy does not name it), the origin of the copy that was read, and
the number of parameters. Copies in public repositories may differ from the model's own file. The number is the one on
the model card, or else the count of the transformers library 5.23; null: not counted. `lacks` lists what a family
needs that Kvasir does not compute. A family that is not in Kvasir's table yet may have entries: they become tests of
acceptance when the family is added to the table.
"""

import json
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.huggingface.families.table import FAMILIES
from model.huggingface.family_table import read_family_config
from model.huggingface.quantization_config import QUANTIZATION_KEY, read_quantization

Entry = dict[str, Any]
CONFIG_PATH = Path("config.json")
_ENTRIES: list[Entry] = json.loads((Path(__file__).parents[1] / "data" / "published_configs.json").read_text())
PUBLISHED = [entry for entry in _ENTRIES if entry["config"]["model_type"] in FAMILIES]
NOT_SERVED = [entry for entry in _ENTRIES if entry["config"]["model_type"] not in FAMILIES]
# Number of parameters and config.json by name.
PUBLIC: dict[str, tuple[int, dict[str, Any]]] = {
    entry["name"]: (entry["num_parameters"], entry["config"]) for entry in PUBLISHED if entry["num_parameters"]
}


def read_published(entry: Entry) -> tuple[ModelConfig, list[str]]:
    """Return the ModelConfig of an entry, and the warnings. Raises CheckpointError, as for a directory."""
    warnings: list[str] = []
    values = dict(entry["config"])
    stored = values.pop(QUANTIZATION_KEY, None)
    config = read_family_config(CONFIG_PATH, values, warnings)[1]
    read_quantization(CONFIG_PATH, stored)
    return config, warnings
