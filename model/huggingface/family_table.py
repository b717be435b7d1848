"""Table of all supported families, by the `model_type` of config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.huggingface.families.family import ModelFamily
from model.huggingface.families.gpt2 import GPT2
from model.huggingface.families.gpt_neox import GPT_NEOX
from model.huggingface.families.llama_like import LLAMA_LIKE
from model.huggingface.families.reader import ConfigReader
from model.io.checkpoint_files import CheckpointError

FAMILIES: Mapping[str, ModelFamily] = {family.model_type: family for family in (GPT2, *LLAMA_LIKE, GPT_NEOX)}


def read_family_config(path: Path, values: Mapping[str, Any]) -> tuple[ModelFamily, ModelConfig]:
    """Return the family and the ModelConfig of a config.json.

    Args:
        path: the file that `values` comes from, for error messages.

    Raises:
        CheckpointError: the model_type or architecture is not supported, or a key requires a feature that is not
            implemented.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    reader = ConfigReader(path, values)
    supported = f"supported are {', '.join(FAMILIES)}"
    if family is None:
        reader.refuse("model_type", values.get("model_type"), f"{supported}; docs/families.md describes how to add one")
    architectures = reader.take("architectures")
    if architectures is not None:
        named = architectures if isinstance(architectures, list) else [architectures]
        if not named or any(name not in family.architectures for name in named):
            reader.refuse(
                "architectures", architectures, f"{family.model_type} is supported only as {family.architectures[0]}"
            )
    try:
        config = family.read_config(reader)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; correct the config") from error
    reader.finish()
    return family, config
