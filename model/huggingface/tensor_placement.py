"""Assignment of checkpoint tensors to model tensors, from the headers of the weight files alone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.gguf.container import is_gguf, read_gguf
from model.huggingface.families.reading.family import Layout, ModelFamily, full_name, sources
from model.huggingface.quantization_config import Encoding, GgufEncoding, Int8Encoding, PlainEncoding, may_be_absent
from model.io.files import CheckpointError, reading
from model.io.safetensors_header import WEIGHT_DTYPES, TensorHeader, read_headers

# Tensors of quantized directories that are not read: scales of inputs, which Kvasir computes for each token.
_IGNORED_IF_QUANTIZED = (r".*\.(input|activation)_(scale|zero_point)",)
_MATRICES = ("layers.", "lm_head.", "layer_inputs.projection.")  # beginnings of names of matrices, unlike embeddings
_LAYER_EMBEDDING = "layer_inputs.embedding.weight"  # of Gemma 4: its rows are only looked up, so it is served as floats
_CHUNK_BYTES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTensor:
    """Stored tensors that a decoder turns into one tensor, such as a quantized matrix.

    shape: shape of the decoded tensor.
    tensors: headers of the stored tensors, by the last part of their names (see `Encoding.roles`).
    """

    encoding: Any  # its type selects the decoder
    shape: tuple[int, ...]
    tensors: Mapping[str, TensorHeader]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Shape of a model tensor, and the headers of the stored tensors that make up the model tensor, in order of rows.

    encoded: the stored tensors of `parts`, grouped as decoders read them; empty if all are floats, not quantized.
    """

    shape: tuple[int, ...]
    layout: Layout
    parts: tuple[TensorHeader, ...]
    encoded: tuple[EncodedTensor, ...] = ()


def place_tensors(
    directory: Path,
    *,
    config: ModelConfig,
    family: ModelFamily | None,
    files: Sequence[Path],
    index: Mapping[str, str],
    encoding: Encoding | None = None,
) -> dict[str, Placement]:
    """Return the checkpoint tensors that make up each model tensor, by the model tensor's name.

    Args:
        family: the checkpoint's model family; None for Kvasir's format.
        index: tensor name -> file name, from the index file; empty without an index file.
        encoding: encoding of quantized matrices, if there are any.

    Raises:
        CheckpointError: a tensor is missing, extra or in two files, or has a wrong shape or an unsupported dtype; the
            index does not match the files; or a tied head differs from its embedding.
    """
    found = _read_all_headers(family, files, None if config.experts is None else config.experts.num)
    _check_index(directory, index, found.values())
    if config.num_layers > len(found):
        raise CheckpointError(
            f"{directory}: its config has {config.num_layers} layers, but its weight files have only "
            f"{len(found)} tensors; use the config that the tensors were saved with"
        )
    placements: dict[str, Placement] = {}
    missing: list[str] = []
    shapes = config.parameter_shapes()
    for name, source in sources(config, family).items():
        parts: list[EncodedTensor] = []
        for part, shape in source.shapes.items():
            has_encoding = len(shape) == 2 and _is_matrix(name, family, encoding)
            parts.append(_find_part(part, shape, found, encoding if has_encoding else None, missing))
        headers = tuple(header for part in parts for header in part.tensors.values())
        is_plain = name == _LAYER_EMBEDDING or all(isinstance(part.encoding, PlainEncoding) for part in parts)
        encoded = () if is_plain else tuple(parts)
        placements[name] = Placement(shape=shapes[name], layout=source.layout, parts=headers, encoded=encoded)
    if family is not None and config.tie_embeddings:
        _drop_tied_head(family, found, placements["token_embedding.weight"])
    if encoding is not None:
        _drop_zero_biases(found)
    ignored = () if family is None else family.ignored_tensors
    ignored += () if encoding is None else _IGNORED_IF_QUANTIZED
    if extra := [h for name, h in found.items() if not any(re.fullmatch(pattern, name) for pattern in ignored)]:
        raise CheckpointError(
            f"{extra[0].path}: tensor {extra[0].name} is not part of the model that the config describes "
            f"({len(extra)} extra); use the config that the tensor was saved with"
        )
    if missing:
        raise CheckpointError(
            f"{directory}: tensor {full_name(family, missing[0])} is in no weight file "
            f"({len(missing)} missing); copy all shards, or use the config that the tensors were saved with"
        )
    return placements


def _is_matrix(name: str, family: ModelFamily | None, encoding: Encoding | None) -> bool:
    """Return whether a matrix may be stored quantized: not a router; an embedding only in GGUF or Kvasir's format."""
    if name in ("token_embedding.weight", _LAYER_EMBEDDING) and isinstance(encoding, GgufEncoding):
        return True
    return not name.endswith("router.weight") and (family is None or name.startswith(_MATRICES))


def _find_part(
    name: str,
    shape: tuple[int, ...],
    found: dict[str, TensorHeader],
    encoding: Encoding | None,
    missing: list[str],
) -> EncodedTensor:
    """Remove the stored tensors of one checkpoint tensor from `found`, and return them with their encoding.

    Names of absent tensors are added to `missing`. Raises CheckpointError for a wrong dtype or shape.
    """
    module, _, kind = name.rpartition(".")
    header = found.get(name)
    if encoding is None or (header is not None and header.dtype in WEIGHT_DTYPES):
        encoding = PlainEncoding(kind=kind)
    elif header is not None and header.dtype == "I8":  # beside int4 matrices
        encoding = Int8Encoding()
    tensors = {}
    for role, (dtypes, shapes) in encoding.roles(shape).items():
        part = f"{module}.{role}"
        if (header := found.pop(part, None)) is not None:
            _check_tensor(header, dtypes, shapes)
            tensors[role] = header
        elif not may_be_absent(encoding, role):
            missing.append(part)
    return EncodedTensor(encoding=encoding, shape=shape, tensors=tensors)


def _read_all_headers(
    family: ModelFamily | None, files: Sequence[Path], num_experts: int | None
) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in all files, by name without the family's prefix and with aliases resolved.

    A tensor of all experts of a layer is replaced by a header for each expert. Raises CheckpointError if two files hold
    the same tensor, or if a tensor has another number of experts than `num_experts`.
    """
    found: dict[str, TensorHeader] = {}
    for path in files:
        for name, header in (read_gguf(path).tensors if is_gguf(path) else read_headers(path)).items():
            short = _short_name(family, name)
            if short in found:
                raise CheckpointError(
                    f"{path}: tensor {name} is in {found[short].path.name} too; remove the outdated file"
                )
            found[short] = header
    return found if num_experts is None else _by_expert(found, num_experts)


def _by_expert(found: Mapping[str, TensorHeader], num_experts: int) -> dict[str, TensorHeader]:
    """Return the headers, with a header for each expert, as experts[0].weight, in place of a tensor of all experts.

    Raises CheckpointError if a tensor has another number of experts.
    """
    pieces: dict[str, TensorHeader] = {}
    for name, header in found.items():
        if len(header.shape) != 3:
            pieces[name] = header
            continue
        if header.shape[0] != num_experts:
            raise CheckpointError(
                f"{header.path}: tensor {header.name} has {header.shape[0]} experts, but the config requires "
                f"{num_experts}; use the config that the tensor was saved with"
            )
        module, _, kind = name.rpartition(".")
        pieces |= {f"{module}[{index}].{kind}": piece for index, piece in enumerate(header.pieces())}
    return pieces


def _check_index(directory: Path, index: Mapping[str, str], found: Iterable[TensorHeader]) -> None:
    """Raise CheckpointError if a tensor is not in the file that the index names."""
    files = {header.name: header.path.name for header in found}
    for name, file_name in index.items():
        if files.get(name) != file_name:
            where = f"in {files[name]}" if name in files else "in no file"
            raise CheckpointError(
                f"{directory / file_name}: tensor {name} is {where}, but the index file lists it in this file; "
                "download the index and all shards again"
            )


def _short_name(family: ModelFamily | None, name: str) -> str:
    if family is None:
        return name
    prefixes = (family.prefix, *family.other_prefixes)
    short = name.removeprefix(next((prefix for prefix in prefixes if name.startswith(prefix)), ""))
    return family.aliases.get(short, short)


def _check_tensor(header: TensorHeader, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    if header.dtype not in dtypes:
        wanted = f"one of {', '.join(dtypes)}" if len(dtypes) > 1 else dtypes[0]
        raise CheckpointError(
            f"{header.path}: tensor {header.name} has dtype {header.dtype}, not {wanted}; save it with such a dtype"
        )
    if header.shape not in shapes:
        raise CheckpointError(
            f"{header.path}: tensor {header.name} has shape {header.shape}, but the config requires {shapes[0]}; "
            "use the config that the tensor was saved with"
        )


def _drop_tied_head(family: ModelFamily, found: dict[str, TensorHeader], embedding: Placement) -> None:
    """Remove a stored tied head from `found`. Raises CheckpointError if the head differs from the embedding."""
    head = found.pop(f"{family.names['lm_head'].modules[0]}.weight", None)
    if head is None or not embedding.parts:
        return
    (other,) = embedding.parts
    if (head.dtype, head.shape) != (other.dtype, other.shape) or not _are_equal(head, other):
        raise CheckpointError(
            f"{head.path}: tensor {head.name} differs from {other.name}, but tie_word_embeddings is true; "
            "if the head is separate, set tie_word_embeddings to false in config.json"
        )


def _drop_zero_biases(found: dict[str, TensorHeader]) -> None:
    """Remove from `found` all biases of zeros: AutoGPTQ adds them to layers that have no bias in the model."""
    for name, header in list(found.items()):
        if name.endswith(".bias") and len(header.shape) == 1 and _is_zero(header):
            del found[name]


def _is_zero(header: TensorHeader) -> bool:
    with reading(header.path), header.path.open("rb") as file:
        file.seek(header.begin)
        starts = range(header.begin, header.end, _CHUNK_BYTES)
        return not any(any(file.read(min(header.end - start, _CHUNK_BYTES))) for start in starts)


def _are_equal(first: TensorHeader, second: TensorHeader) -> bool:
    with reading(first.path), first.path.open("rb") as one, second.path.open("rb") as other:
        one.seek(first.begin)
        other.seek(second.begin)
        for start in range(first.begin, first.end, _CHUNK_BYTES):
            size = min(first.end - start, _CHUNK_BYTES)
            if one.read(size) != other.read(size):
                return False
    return True
