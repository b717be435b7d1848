"""Definition of a model family, and the checkpoint tensors that make up each tensor of Kvasir's model."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from model.config import ModelConfig
from model.config_enums import MAX_SIZE
from model.huggingface.families.reading.reader import ConfigReader
from model.io.files import CheckpointError


class Layout(StrEnum):
    """Layout of one tensor of Kvasir's model in a checkpoint: stored unchanged, transposed, in parts or reordered."""

    AS_IS = "as is"
    TRANSPOSED = "transposed"  # (in, out) instead of (out, in): GPT-2's Conv1D
    CONCATENATED = "concatenated"  # several tensors, concatenated along the rows: q, k, v or gate, up
    INTERLEAVED_HEADS = "interleaved heads"  # q, k and v of head 0, then those of head 1, ...: GPT-NeoX
    ROTARY_PAIRS = "rotary pairs"  # concatenated; rows i and i + D/2 of a head of q and k are adjacent: GGUF's llama
    ONE_ADDED = "one added"  # 1 + weight: the norms of Gemma in GGUF


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the checkpoint modules (q, k, v) that make up one module of Kvasir's model (qkv), in the order of rows.

    modules: names in the checkpoint, with `#` for the number of the layer, and of the expert. `[#]`: the checkpoint has
        one tensor for all experts of a layer, whose first dimension is the experts.
    layout: layout of the weight. A bias is never transposed.
    """

    modules: tuple[str, ...]
    layout: Layout = Layout.AS_IS


@dataclass(frozen=True, slots=True)
class Source:
    """Checkpoint tensors that make up one tensor of Kvasir's model.

    shapes: required shape by tensor name without the family's prefix, in the order of rows.
    """

    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """Model family: config reader, tensor names and tensor layouts of one `model_type` in config.json.

    architectures: `transformers` classes with supported checkpoints; the class with the language model head is first.
    read_config: converts config.json to ModelConfig; raises ValueError for features that are not implemented.
    names: module of Kvasir's model -> modules of the checkpoint, without `prefix`.
    prefix: beginning of tensor names, except the head's. Checkpoints of the bare model (without the head) lack it.
    ignored_tensors: regular expressions of tensor names to skip: constants in old files (masks, rotary frequencies).
    aliases: alternative tensor name found in real files -> usual name, which follows from `names`.
    other_prefixes: alternatives to `prefix` found in real files.
    left_out: part of the checkpoint that is not served, for users; empty: nothing.
    """

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[ConfigReader], ModelConfig]
    names: Mapping[str, Names]
    prefix: str
    ignored_tensors: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    other_prefixes: tuple[str, ...] = ()
    left_out: str = ""


def plain(module: str) -> Names:
    """Return the Names of one checkpoint module whose tensors already have Kvasir's layout."""
    return Names((module,))


def concatenated(*modules: str) -> Names:
    """Return the Names of checkpoint modules whose tensors Kvasir's model has concatenated along the rows."""
    return Names(modules, Layout.CONCATENATED)


def convert_config(family: ModelFamily, reader: ConfigReader) -> ModelConfig:
    """Convert a config.json to a ModelConfig. Raises CheckpointError for a key or value that is not supported."""
    try:
        config = _extended(family.read_config(reader))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{reader.path}: {error}; correct the config") from error
    reader.check_unread()
    return config


def _extended(config: ModelConfig) -> ModelConfig:
    """Return the config with `max_context_length` extended by dynamic rope scaling; unchanged with other scaling.

    config: `max_context_length` is the number of positions in config.json.
    """
    scaling = config.rope_scaling
    if scaling is None or (original := scaling.dynamic_original) is None:
        return config
    extended = int(min(scaling.factor * original, MAX_SIZE + 1))
    return replace(config, max_context_length=max(original, extended))


def sources(config: ModelConfig, family: ModelFamily | None) -> dict[str, Source]:
    """Return the checkpoint tensors that make up each tensor of Kvasir's model, by the name in Kvasir's model.

    family: the checkpoint's family; None for Kvasir's format, which stores every tensor under its own name.
    """
    shapes = config.parameter_shapes()
    if family is None:
        return {name: Source(Layout.AS_IS, {name: shape}) for name, shape in shapes.items()}
    return {name: _source(config, family, name, shape) for name, shape in shapes.items()}


def _source(config: ModelConfig, family: ModelFamily, name: str, shape: tuple[int, ...]) -> Source:
    module, _, kind = name.rpartition(".")
    names = family.names[re.sub(r"\.\d+(?=\.|$)", ".#", module)]
    numbers = re.findall(r"\.(\d+)(?=\.|$)", module)
    parts = [f"{_numbered(part, numbers)}.{kind}" for part in names.modules]
    if names.layout in (Layout.CONCATENATED, Layout.ROTARY_PAIRS):
        rows = zip(parts, _rows(config, module, shape[0]), strict=True)
        return Source(names.layout, {part: (row, *shape[1:]) for part, row in rows if row})
    if names.layout is Layout.TRANSPOSED:
        return Source(Layout.AS_IS if len(shape) == 1 else names.layout, {parts[0]: shape[::-1]})
    return Source(names.layout, {parts[0]: shape})


def _numbered(name: str, numbers: list[str]) -> str:
    for number in numbers:
        name = name.replace("#", number, 1)
    return name


def _rows(config: ModelConfig, module: str, rows: int) -> tuple[int, ...]:
    """Return each checkpoint tensor's number of rows in a concatenated matrix of a layer, qkv or gate_up.

    The number is 0 for k and v of a layer that reads those of an earlier layer. rows: number of rows of the matrix.
    """
    if module.endswith(".gate_up"):
        return rows // 2, rows // 2
    query = config.num_heads * config.head_dim_of(int(module.split(".")[1]))
    key = (rows - query) // 2
    return query, key, key


def full_name(family: ModelFamily | None, name: str) -> str:
    """Return a checkpoint tensor's name with the family's prefix; unchanged for the head, or if `family` is None."""
    if family is None or name.startswith(family.names["lm_head"].modules[0] + "."):
        return name
    return family.prefix + name
