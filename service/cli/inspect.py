"""Command `kvasir inspect`: print config, memory, tokens, files and training of a checkpoint."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.chat.template import load_chat_template
from model.checkpoint.manifest import Manifest, read_manifest
from model.config import ModelConfig
from model.config_enums import NormKind, PositionKind
from model.inspect.parameter_counts import count_parameters, kv_cache_formula
from model.sampling.generation_config import read_generation_config
from model.tokenizer.interface import Tokenizer
from service.config.settings import InspectSettings

Rows = Iterator[tuple[str, object]]


def main(settings: InspectSettings) -> int:
    """Print config, memory, tokens, files and training of a checkpoint."""
    manifest = read_manifest(settings.checkpoint)
    tokenizer = manifest.verify()
    files = "files, all hashes correct" if manifest.family is None else "files, not verified: no hashes known"
    sections: dict[str, list[tuple[str, object]]] = {
        f"{manifest.name} ({manifest.directory})": list(_choices(manifest.config)),
        "parameters": list(_parameter_rows(manifest.config)),
        "memory": list(_memory_rows(manifest.config)),
        "tokens": list(_token_rows(manifest, tokenizer)),
        files: list(_file_rows(manifest)),
        "training": list(_flat(manifest.training)),
    }
    for title, rows in sections.items():
        if rows:
            width = max(len(name) for name, _ in rows)
            print(title, *(f"  {name:<{width}}  {value}" for name, value in rows), "", sep="\n")
    return 0


def _choices(config: ModelConfig) -> Rows:
    """Yield the config fields that affect this model. A field of an unused mechanism has no effect."""
    uses = {
        "rope_theta": config.position is PositionKind.ROTARY,
        "norm_bias": config.norm is NormKind.LAYER_NORM,
        "norm_unit_offset": config.norm is NormKind.RMS_NORM,
        "qk_norm_scope": config.qk_norm,
    }
    for name, value in config.to_dict().items():
        if value is not None and value != [] and uses.get(name, True):
            yield name, value


def _parameter_rows(config: ModelConfig) -> Rows:
    groups: Counter[str] = Counter()
    for part in count_parameters(config):
        groups[part.group] += part.num_counted
    for group, number in groups.items():
        yield group, f"{number:>15,}  {number / config.num_parameters:6.1%}"
    yield "total", f"{config.num_parameters:>15,}"


def _memory_rows(config: ModelConfig) -> Rows:
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        kv_cache = kv_cache_formula(config, size)
        yield (
            dtype,
            f"weights {_size(config.num_parameters * size)}, KV-cache {kv_cache.text} = {kv_cache.value:,} bytes "
            f"per token, {_size(kv_cache.value * config.max_context_length)} per full context",
        )


def _token_rows(manifest: Manifest, tokenizer: Tokenizer) -> Rows:
    """Yield vocabulary, begin and end tokens, sampling defaults and chat template of the checkpoint."""
    wanted = read_generation_config(manifest.directory)

    def named(ids: Sequence[int]) -> str:
        return ", ".join(f"{token_id} {tokenizer.format_token_name(token_id)!r}" for token_id in ids) if ids else "none"

    yield "vocabulary", f"{tokenizer.vocab_size:,}, including {len(tokenizer.special_tokens)} special tokens"
    yield "begin-of-text token", named([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])
    yield "end-of-text tokens", named(tokenizer.eos_token_ids)
    sampling = {
        field.name: value
        for field in dataclasses.fields(wanted)
        if field.name not in ("ignored", "eos_token_ids", "bos_token_id", "pad_token_id")
        and (value := getattr(wanted, field.name)) is not None
    }
    defaults = ", ".join(f"{name} {value}" for name, value in sampling.items())
    yield "generation defaults", defaults if defaults else "not set"
    if wanted.ignored:
        yield "ignored defaults", ", ".join(wanted.ignored)
    template = load_chat_template(manifest.directory)
    summary = (
        "not set" if template is None else f"{len(template.source):,} characters, from {Path(template.origin).name}"
    )
    yield "chat template", summary


def _file_rows(manifest: Manifest) -> Rows:
    for name, (size, digest) in manifest.files.items():
        yield name, f"{size:>13,} bytes" + (f"  SHA-256 {digest[:16]}…" if digest else "")


def _flat(values: Mapping[str, Any]) -> Rows:
    """Yield nested values as rows of one level. A list of mappings, such as training sources, becomes one row each."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield name, _in_words(value)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            yield from ((name if index == 0 else "", _in_words(item)) for index, item in enumerate(value))
        else:
            yield name, _short(value)


def _in_words(values: Mapping[str, Any]) -> str:
    words = dict(values)
    begin = f"{words.pop('name')}: " if "name" in words else ""
    texts = {name.replace("_", " "): _short(value) for name, value in words.items() if value not in ("", None)}
    return begin + ", ".join(f"{name} {value}" for name, value in texts.items())


def _short(value: object) -> str:
    """Format a value briefly: the first 16 characters of a hash, or a float with at least 4 significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    text = str(value)
    return f"{text[:16]}…" if len(text) == 64 and " " not in text else text


def _size(num_bytes: int) -> str:
    """Format a size in MB, or in kB below 1 MB."""
    return f"{num_bytes / 2**20:,.1f} MB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} kB"
