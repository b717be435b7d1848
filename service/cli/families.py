"""Command `kvasir families`: the supported model families, what each supports, and the date of its parity proof."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.config_enums import RopeScalingKind
from model.gguf.architectures import GGUF_FAMILIES
from model.huggingface.families.reading.family import ModelFamily
from model.huggingface.families.table import FAMILIES, PROOFS_FILE
from model.huggingface.family_table import read_family_config
from model.io.files import CheckpointError, read_json
from service.config.settings import FamiliesSettings

_PATH = Path("config.json")
_WINDOW = {"sliding_window": 8}
_WINDOWS = (_WINDOW, {**_WINDOW, "use_sliding_window": True, "max_window_layers": 0})
_BIASES = tuple({key: True} for key in ("attention_bias", "use_qkv_bias", "use_bias"))
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "activation_function")
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_DEFAULT_ROPE = "default"
_LEGEND = """
activations: those that a config key can choose; empty: the family has only one
proved: date of the oldest passed parity test with the transformers library; checks: number of these tests"""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFacts:
    """Variants of a model family that its config reader accepts, and dates of passed parity tests with transformers.

    rope_types: types of rotary embeddings; empty: none.
    has_windows, has_biases, has_gguf: sliding windows, biases of q, k and v, and GGUF files are supported.
    checks: names of the parity tests that passed. proved: date of the oldest of them; empty: none passed.
    """

    model_type: str
    architecture: str
    activations: tuple[str, ...]
    rope_types: tuple[str, ...]
    has_windows: bool
    has_biases: bool
    has_gguf: bool
    proved: str
    checks: tuple[str, ...]


def main(settings: FamiliesSettings) -> int:
    """Run `kvasir families`: print a line for each family, at most 100 characters long, or JSON with all facts."""
    facts = [family_facts(family) for family in FAMILIES.values()]
    if settings.json_:
        print(json.dumps([asdict(family) for family in facts], indent=2))
        return 0
    rows: list[tuple[str, ...]] = [("model_type", "activations", "windows", "biases", "GGUF", "proved", "checks")]
    rows += [
        (
            family.model_type,
            ", ".join(family.activations),
            *("yes" if has else "no" for has in (family.has_windows, family.has_biases, family.has_gguf)),
            family.proved or "no",
            str(len(family.checks)),
        )
        for family in facts
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print(_LEGEND, file=sys.stderr)
    return 0


def family_facts(family: ModelFamily) -> FamilyFacts:
    """Return what a family supports, found by trying small configs with its reader, and its passed checks."""
    proof = read_json(PROOFS_FILE).get(family.model_type, {})
    return FamilyFacts(
        model_type=family.model_type,
        architecture=family.architectures[0],
        activations=tuple(name for name in _ACTIVATIONS if _accepts_activation(family, name)),
        rope_types=tuple(kind for kind in (_DEFAULT_ROPE, *RopeScalingKind) if _accepts_rope(family, kind)),
        has_windows=any(config.sliding_window is not None for config in _read_each(family, _WINDOWS)),
        has_biases=any(config.attention_bias for config in _read_each(family, _BIASES)),
        has_gguf=family.model_type in GGUF_FAMILIES,
        proved=min(proof.values(), default=""),
        checks=tuple(proof),
    )


def _accepts_activation(family: ModelFamily, name: str) -> bool:
    """Return True if a config key of the family accepts this activation, and rejects a name that does not exist."""
    return any(
        _read(family, {key: name}) is not None and _read(family, {key: "no activation"}) is None
        for key in _ACTIVATION_KEYS
    )


def _accepts_rope(family: ModelFamily, kind: str) -> bool:
    """Return True if the family's reader knows a type of rotary embedding, and rejects a type that does not exist.

    Another error, such as that the type's parameters are missing, does not matter.
    """
    problems = [_problem(family, {"rope_scaling": {"rope_type": name}}) for name in (kind, "no type")]
    return "rope_type=" not in problems[0] and "rope_type=" in problems[1]


def _read_each(family: ModelFamily, several: tuple[Mapping[str, Any], ...]) -> list[ModelConfig]:
    return [config for values in ({}, *several) if (config := _read(family, values)) is not None]


def _read(family: ModelFamily, values: Mapping[str, Any]) -> ModelConfig | None:
    try:
        return read_family_config(_PATH, _values_of(family, values))[1]
    except CheckpointError:
        return None


def _problem(family: ModelFamily, values: Mapping[str, Any]) -> str:
    try:
        read_family_config(_PATH, _values_of(family, values))
    except CheckpointError as error:
        return str(error)
    return ""


def _values_of(family: ModelFamily, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with these values, in `text_config` if the family has a part such as a vision tower."""
    inner = {"text_config": dict(values)} if family.left_out else dict(values)
    return {"model_type": family.model_type, **inner}
