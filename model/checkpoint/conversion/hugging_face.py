"""Export of a Kvasir checkpoint as a Hugging Face directory that the transformers library can run."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint.conversion.pickles import METADATA
from model.checkpoint.manifest import CONFIG_FILE, Manifest, read_manifest
from model.checkpoint.weights import DTYPES, part_views, read_weights, write_shards
from model.config import ModelConfig
from model.huggingface.families.family import ModelFamily, full_name, sources
from model.huggingface.family_table import describe
from model.io.files import read_json, written_whole
from model.sampling.generation_config import GENERATION_CONFIG_FILE
from model.tokenizer.export import export_tokenizer


def export_checkpoint(directory: Path, out: Path) -> Manifest:
    """Export a checkpoint as a Hugging Face directory: config, weights, tokenizer and generation defaults.

    Raises:
        CheckpointError: the checkpoint is damaged, no family can express its model, its tokenizer has no equivalent in
            Hugging Face's format, or `out` is not empty.
    """
    manifest = read_manifest(directory)
    tokenizer = manifest.verify()
    family, values = describe(manifest.config)
    defaults = read_json(directory / GENERATION_CONFIG_FILE, optional=True)
    ends = list(tokenizer.eos_token_ids)
    marks = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    with written_whole(out) as new:
        export_tokenizer(tokenizer, directory, new)
        dtype = _export_weights(manifest, family, new)
        _write_json(new / CONFIG_FILE, {**values, **marks, "dtype": str(dtype).removeprefix("torch.")})
        known = {key: value for key, value in marks.items() if value is not None}
        _write_json(new / GENERATION_CONFIG_FILE, {**defaults, **known})
        read_manifest(new).verify()
    return read_manifest(out)


def _export_weights(manifest: Manifest, family: ModelFamily, out: Path) -> torch.dtype:
    """Write weights under a family's tensor names, in their stored dtype; float32 if they have several dtypes."""
    placements = manifest.place_tensors()
    stored = {header.dtype for place in placements.values() for header in place.parts}
    dtype = DTYPES[stored.pop()] if len(stored) == 1 else torch.float32
    tensors = read_weights(placements, manifest.config, device="cpu", dtype=dtype)
    shapes = {name: s for source in sources(manifest.config, family).values() for name, s in source.shapes.items()}
    num_bytes = {full_name(family, name): math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    write_shards(out, num_bytes, _taken_apart(tensors, manifest.config, family), metadata=METADATA)
    return dtype


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _taken_apart(tensors: Mapping[str, Tensor], config: ModelConfig, family: ModelFamily) -> Iterator[Tensor]:
    """Yield the family's tensors, cut from the model's, in the order of `sources`."""
    for name, source in sources(config, family).items():
        shapes = source.shapes.values()
        views = part_views(tensors[name], source.layout, (shape[0] for shape in shapes), config)
        for shape, view in zip(shapes, views, strict=True):
            yield view.reshape(shape).contiguous()
