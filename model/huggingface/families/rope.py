"""Reader of a config.json's rotary embedding: `rope_theta` and `rope_scaling`, or `rope_parameters` in newer files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.config_enums import RopeScaling, RopeScalingKind
from model.huggingface.families.reader import ConfigReader
from model.io.files import CheckpointError

DEFAULT_THETA = 10_000.0
_TYPES = ("default", *RopeScalingKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary embedding: base and scaling of the frequencies, and the fraction of each head that is rotated."""

    theta: float
    scaling: RopeScaling | None
    partial: float


def read_rope(
    reader: ConfigReader,
    *,
    max_positions: int,
    theta_names: tuple[str, ...] = ("rope_theta",),
    partial_names: tuple[str, ...] = (),
    partial: float = 1.0,
) -> Rope:
    """Read all keys of the rotary embedding. A value that several keys set must be equal in all of them.

    Args:
        max_positions: original context length, if the config does not set it.
        theta_names, partial_names: the family's top-level keys for `theta` and `partial`.

    Raises:
        CheckpointError: the rope type is unsupported, a key is unknown, or two keys contradict each other.
    """
    name, values = _scaling_values(reader)
    kind = _kind(reader, name, values)
    theta = _agreed(reader, [(f"{name}.rope_theta", values.pop("rope_theta", None))], theta_names, DEFAULT_THETA)
    inner = (f"{name}.partial_rotary_factor", values.pop("partial_rotary_factor", None))
    fraction = _agreed(reader, [inner], partial_names, partial)
    if not partial_names and fraction != 1.0:
        reader.refuse(inner[0], fraction, "this family rotates whole heads; use a checkpoint without it")
    if fraction > 1.0:
        reader.refuse(inner[0], fraction, "at most 1.0 is possible; correct the config")
    original = values.pop("original_max_position_embeddings", max_positions)
    if kind == "default":
        scaling = None
    else:
        fields = {"kind": kind, "factor": values.pop("factor", None)}
        if kind == RopeScalingKind.LLAMA3:
            fields |= {key: values.pop(key, None) for key in ("low_freq_factor", "high_freq_factor")}
            fields["original_context_length"] = original
        try:
            scaling = RopeScaling.from_dict(fields)
        except ValueError as error:
            raise CheckpointError(f"{reader.path}: {name}: {error}") from error
    if values:
        key = sorted(values)[0]
        reader.refuse(f"{name}.{key}", values[key], f"not a key of rope type {kind}; use a checkpoint without it")
    return Rope(theta=theta, scaling=scaling, partial=fraction)


def _scaling_values(reader: ConfigReader) -> tuple[str, dict[str, Any]]:
    """Return the key that holds the rope dictionary, and the dictionary without null entries."""
    found = [(name, reader.take(name)) for name in ("rope_scaling", "rope_parameters")]
    for name, value in found:
        if not isinstance(value, Mapping | None):
            reader.refuse(name, value, "expected a JSON object or null; correct the config")
    filled = [(name, value) for name, value in found if value]
    if len(filled) == 2 and filled[0][1] != filled[1][1]:
        reader.refuse("rope_scaling", filled[0][1], "rope_parameters has another value; keep the correct one")
    name, value = filled[0] if filled else ("rope_parameters", {})
    return name, {key: entry for key, entry in value.items() if entry is not None}


def _kind(reader: ConfigReader, name: str, values: dict[str, Any]) -> str:
    kinds = {str(values.pop(key)) for key in ("rope_type", "type") if key in values} or {"default"}
    if len(kinds) > 1 or not kinds <= set(_TYPES):
        kind = " and ".join(sorted(kinds))
        reader.refuse(
            f"{name}.rope_type", kind, f"supported are {', '.join(_TYPES)}; use a checkpoint with one of these"
        )
    return kinds.pop()


def _agreed(reader: ConfigReader, inner: list[tuple[str, object]], names: tuple[str, ...], default: float) -> float:
    given = [(name, value) for name, value in inner if value is not None]
    given += [(name, value) for name in names if (value := reader.take(name)) is not None]
    values = [(name, ConfigReader(reader.path, {name: value}).number(name, default)) for name, value in given]
    if len({value for _, value in values}) > 1:
        (first, _), (name, value) = values[0], next(entry for entry in values if entry[1] != values[0][1])
        reader.refuse(name, value, f"{first} is {values[0][1]}; keep the correct one")
    return values[0][1] if values else default
