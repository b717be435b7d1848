"""Export of a checkpoint as a Hugging Face directory."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint.manifest import CONFIG_FILE, Manifest, read_manifest
from model.checkpoint.weights import DTYPES, part_views, read_weights, write_shards
from model.config import ModelConfig
from model.huggingface.families.reading.family import ModelFamily, Source, full_name, sources
from model.huggingface.family_table import hugging_face_config
from model.io.files import CheckpointError, read_json, write_json, written_whole
from model.tokenizer.export import export_tokenizer
from model.tokenizer.generation_config import GENERATION_CONFIG_FILE


def export_checkpoint(directory: Path, out: Path) -> Manifest:
    """Write a checkpoint to `out` in Hugging Face's format, and return the manifest of `out`.

    Written are the config, weights, tokenizer, chat template and default sampling parameters.

    Raises:
        CheckpointError: the checkpoint is damaged, quantized or cannot be expressed in this format, or `out` is not
            empty.
    """
    manifest = read_manifest(directory)
    tokenizer = manifest.verify()
    if manifest.quantization is not None:
        raise CheckpointError(f"{directory}: quantized matrices are not exported; export the unquantized checkpoint")
    family, values = hugging_face_config(manifest.config, manifest.family)
    defaults = read_json(directory / GENERATION_CONFIG_FILE, optional=True)
    ends = list(tokenizer.eos_token_ids)
    special_ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    with written_whole(out) as new:
        export_tokenizer(tokenizer, directory, new)
        dtype = _export_weights(manifest, family, new)
        write_json(new / CONFIG_FILE, {**values, **special_ids, "dtype": str(dtype).removeprefix("torch.")})
        known = {key: value for key, value in special_ids.items() if value is not None}
        write_json(new / GENERATION_CONFIG_FILE, {**defaults, **known})
        read_manifest(new).verify()
    return read_manifest(out)


def _export_weights(manifest: Manifest, family: ModelFamily, out: Path) -> torch.dtype:
    """Write weights under a model family's tensor names. Return their dtype: as stored, or float32 for mixed dtypes."""
    placements = manifest.placements
    stored = {header.dtype for place in placements.values() for header in place.parts}
    dtype = DTYPES[stored.pop()] if len(stored) == 1 else torch.float32
    tensors = read_weights(placements, manifest.config, device="cpu", dtype=dtype)
    places = _family_places(manifest.config, family)
    num_bytes = {
        full_name(family, name): sum(math.prod(place.shape) for place in parts) * dtype.itemsize
        for name, parts in places.items()
    }
    write_shards(out, num_bytes, _family_tensors(tensors, manifest.config, places))
    return dtype


class _Place(NamedTuple):
    """Part of a Kvasir tensor (q of qkv) that becomes a Hugging Face tensor, or one expert's piece of such a tensor.

    name: name of the Kvasir tensor. source: all parts of this tensor. part: number of this part among all parts.
    shape: shape of this part in Hugging Face's format.
    is_piece: the Hugging Face tensor holds all experts of a layer, and this part is that of one expert.
    """

    name: str
    source: Source
    part: int
    shape: tuple[int, ...]
    is_piece: bool


def _family_places(config: ModelConfig, family: ModelFamily) -> dict[str, list[_Place]]:
    """Return the parts of Kvasir tensors that make up each Hugging Face tensor: one, or one per expert."""
    places: dict[str, list[_Place]] = {}
    for name, source in sources(config, family).items():
        for part, (stored, shape) in enumerate(source.shapes.items()):
            whole = re.sub(r"\[\d+\]", "", stored)
            places.setdefault(whole, []).append(_Place(name, source, part, shape, whole != stored))
    return places


def _family_tensors(
    tensors: Mapping[str, Tensor], config: ModelConfig, places: Mapping[str, list[_Place]]
) -> Iterator[Tensor]:
    """Yield the tensors of Hugging Face's format, in the order of `places`.

    Each is cut from a tensor of Kvasir's model (q, k, v from qkv), or stacked from the parts of all experts.
    """
    for parts in places.values():
        found = []
        for place in parts:
            rows = (shape[0] for shape in place.source.shapes.values())
            view = part_views(tensors[place.name], place.source.layout, rows, config)[place.part]
            found.append(view.reshape(place.shape))
        yield torch.stack(found) if parts[0].is_piece else found[0].contiguous()
