"""Export of a checkpoint as a Hugging Face directory."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.manifest import CONFIG_FILE, Manifest, read_manifest
from model.checkpoint.weights import DTYPES, part_views, read_weights, write_shards
from model.config import ModelConfig
from model.huggingface.families.family import ModelFamily, full_name, sources
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
        raise CheckpointError(
            f"{directory}: quantized matrices are not exported; export the checkpoint from before the quantization"
        )
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
    shapes = {name: s for source in sources(manifest.config, family).values() for name, s in source.shapes.items()}
    num_bytes = {full_name(family, name): math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    write_shards(out, num_bytes, _family_tensors(tensors, manifest.config, family))
    return dtype


def _family_tensors(tensors: Mapping[str, Tensor], config: ModelConfig, family: ModelFamily) -> Iterator[Tensor]:
    """Yield tensors of Hugging Face's format (q, k, v), cut from Kvasir's (qkv), in the order of `sources`."""
    for name, source in sources(config, family).items():
        shapes = source.shapes.values()
        views = part_views(tensors[name], source.layout, (shape[0] for shape in shapes), config)
        for shape, view in zip(shapes, views, strict=True):
            yield view.reshape(shape).contiguous()
