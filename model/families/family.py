"""What a family of checkpoints is: how its config reads, what its tensors are called and how they are laid out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from model.config import ModelConfig
from model.families.reader import ConfigReader


class Layout(StrEnum):
    """How the tensors of a checkpoint make up one of ours."""

    AS_IS = "as is"
    TRANSPOSED = "transposed"  # (in, out) instead of (out, in): GPT-2's Conv1D
    CONCATENATED = "concatenated"  # several tensors, one below the other: q, k, v or gate, up
    INTERLEAVED_HEADS = "interleaved heads"  # q, k and v of head 0, then those of head 1, ...: GPT-NeoX


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The modules of a checkpoint that hold one of our modules, `#` for the layer's number, in our order.

    `layout` is that of the weight; a bias is never transposed.
    """

    modules: tuple[str, ...]
    layout: Layout = Layout.AS_IS


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A tensor of a checkpoint: its name and the shape it must have there."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What one of our tensors is made of."""

    layout: Layout
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One `model_type` of Hugging Face.

    model_type: the config's key that says so. architectures: the classes whose checkpoints we read, the one with
        the language model's head first.
    read_config: config.json to ModelConfig; raises CheckpointError for what we do not compute.
    names: our module -> theirs, without `prefix`, which files of the bare model lack.
    aliases: other names the same modules have in real files.
    ignored_tensors: regular expressions for constants that old files carry along: masks and rotary frequencies.
    """

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[ConfigReader], ModelConfig]
    names: Mapping[str, Names]
    prefix: str
    aliases: Mapping[str, str]
    ignored_tensors: tuple[str, ...]


def plain(module: str) -> Names:
    """One module, as it is."""
    return Names(modules=(module,))


def concatenated(*modules: str) -> Names:
    """Several modules, one below the other."""
    return Names(modules=modules, layout=Layout.CONCATENATED)


def sources(config: ModelConfig, family: Family | None) -> dict[str, Source]:
    """For each of our tensors, what fills it in a checkpoint of this family; None is our own format."""
    shapes = config.parameter_shapes()
    if family is None:
        return {name: Source(layout=Layout.AS_IS, parts=(Part(name=name, shape=s),)) for name, s in shapes.items()}
    return {name: _source(config, family, name, shape) for name, shape in shapes.items()}


def _source(config: ModelConfig, family: Family, name: str, shape: tuple[int, ...]) -> Source:
    module, _, kind = name.rpartition(".")
    first, _, rest = module.partition(".")
    layer, _, inner = rest.partition(".")
    names = family.names[f"{first}.#.{inner}" if first == "layers" else module]
    theirs = [f"{part.replace('#', layer)}.{kind}" for part in names.modules]
    if names.layout is Layout.CONCATENATED:
        rows = _rows(config, inner)
        parts = tuple(Part(name=part, shape=(row, *shape[1:])) for part, row in zip(theirs, rows, strict=True))
        return Source(layout=names.layout, parts=parts)
    transposed = names.layout is Layout.TRANSPOSED
    layout = Layout.AS_IS if transposed and len(shape) == 1 else names.layout
    return Source(layout=layout, parts=(Part(name=theirs[0], shape=shape[::-1] if transposed else shape),))


def _rows(config: ModelConfig, module: str) -> tuple[int, ...]:
    """Rows of the parts that a joined matrix of ours consists of."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {"attention.qkv": (query, key, key), "mlp.gate_up": (config.mlp_size, config.mlp_size)}[module]


def full_name(family: Family | None, name: str) -> str:
    """A tensor's name as complete files have it: the head stands beside the bare model, all else in it."""
    if family is None or name.startswith(family.names["lm_head"].modules[0] + "."):
        return name
    return family.prefix + name
