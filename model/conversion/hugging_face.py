"""One of our checkpoints as a Hugging Face directory that the transformers library computes alike."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.checkpoint import save_shard
from model.checkpoint_files import read_json
from model.config import ModelConfig
from model.conversion.safetensors_directory import METADATA
from model.conversion.whole import written_whole
from model.families.directory import INDEX_FILE, SINGLE_FILE
from model.families.export import describe
from model.families.family import Family, full_name, sources
from model.generation_config import GENERATION_CONFIG_FILE
from model.manifest import CONFIG_FILE, Manifest, read_manifest
from model.tokenizer.export import export_tokenizer
from model.weights import part_views, read_weights

MAX_SHARD_BYTES = 2**30
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def export_checkpoint(directory: Path, out: Path) -> Manifest:
    """Make a Hugging Face directory of a checkpoint of ours: config, weights, tokenizer, end marks, defaults.

    Raises:
        CheckpointError: the checkpoint is damaged, no family computes its model, or `out` is taken.
        TokenizerError: the tokenizer has no equal in Hugging Face's format.
    """
    manifest = read_manifest(directory)
    tokenizer = manifest.verify()
    family, values = describe(manifest.config)
    asked = directory / GENERATION_CONFIG_FILE
    defaults = read_json(asked) if asked.exists() else {}
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


def _export_weights(manifest: Manifest, family: Family, out: Path) -> torch.dtype:
    """Write the weights under the family's names, in the dtype they are stored in; float32 where they have several."""
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
        _write_json(out / INDEX_FILE, {"weight_map": weight_map})
    return dtype


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _renamed(tensors: Mapping[str, Tensor], config: ModelConfig, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Our tensors taken apart into the family's."""
    for name, source in sources(config, family).items():
        views = part_views(tensors[name], source.layout, (part.shape[0] for part in source.parts), config)
        for part, view in zip(source.parts, views, strict=True):
            yield full_name(family, part.name), view.reshape(part.shape).contiguous()
