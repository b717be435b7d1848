"""One of our checkpoints as a Hugging Face directory that the transformers library computes alike."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import save_shard
from model.config import ModelConfig
from model.conversion.safetensors_directory import METADATA, make_empty
from model.families.directory import INDEX_FILE, SINGLE_FILE
from model.families.export import describe
from model.families.family import Family, full_name, sources
from model.manifest import CONFIG_FILE, Manifest, read_manifest
from model.weights import part_views, read_weights

MAX_SHARD_BYTES = 2**30
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def export_weights(manifest: Manifest, out: Path) -> Family:
    """Write config.json and the weights under the names of the family that computes this model.

    They keep the dtype they are stored in, and are float32 where they have several.

    Raises:
        CheckpointError: no family does, or `out` is taken.
    """
    family, values = describe(manifest.config)
    make_empty(out)
    placements = manifest.place_tensors()
    stored = {header.dtype for place in placements.values() for header in place.parts}
    dtype = _DTYPES[stored.pop()] if len(stored) == 1 else torch.float32
    tensors = read_weights(placements, manifest.config, device="cpu", dtype=dtype)
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in _renamed(tensors, manifest.config, family):
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_shard(shard, out / name, metadata=METADATA)
        weight_map |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        (out / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=2) + "\n")
    (out / CONFIG_FILE).write_text(json.dumps({**values, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
    return family


def _renamed(tensors: Mapping[str, Tensor], config: ModelConfig, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Our tensors taken apart into the family's."""
    for name, source in sources(config, family).items():
        views = part_views(tensors[name], source.layout, (part.shape[0] for part in source.parts), config)
        for part, view in zip(source.parts, views, strict=True):
            yield full_name(family, part.name), view.reshape(part.shape).contiguous()


def export_checkpoint(directory: Path, out: Path) -> Manifest:
    """Make a Hugging Face directory of a checkpoint of ours.

    Raises:
        CheckpointError: the checkpoint is damaged, no family computes its model, or `out` is taken.
    """
    manifest = read_manifest(directory)
    manifest.verify()
    export_weights(manifest, out)
    return read_manifest(out)
