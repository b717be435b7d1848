"""Command `kvasir inspect`: a checkpoint, and how it would be served on this machine, from headers alone."""

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from model.chat.template import load_chat_template
from model.checkpoint.manifest import CONFIG_FILE, MANIFEST_FILE, Manifest, read_manifest
from model.config import ModelConfig
from model.config_enums import NormKind, PositionKind
from model.gguf.container import is_gguf
from model.inspect import parameter_counts
from model.io.files import error_line, first_line
from model.tokenizer.files import load_tokenizer
from model.tokenizer.generation_config import read_generation_config
from model.tokenizer.interface import Tokenizer
from service.config.settings import InspectSettings, ServeSettings
from service.preprocess.served_model import ServedModel, read_served_model
from service.worker.engine_factory import EngineForecast, forecast_engine
from service.worker.memory_plan import ServerNeeds

T = TypeVar("T")
Rows = Iterator[tuple[str, object]]

_STREAM_LENGTHS = (1024, 8192, 32_768)


@dataclasses.dataclass(kw_only=True, slots=True)
class Findings:
    """Results of an inspection. A part that cannot be read or built is None, with the reason in `refusals`.

    warnings: keys and files that are ignored, a line each.
    refusals: reasons why the checkpoint would not be served, a line each.
    """

    manifest: Manifest | None = None
    tokenizer: Tokenizer | None = None
    served: ServedModel | None = None
    engine: EngineForecast | None = None
    warnings: list[str] = dataclasses.field(default_factory=list)
    refusals: list[str] = dataclasses.field(default_factory=list)

    def attempt(self, read: Callable[[], T]) -> T | None:
        """Return the result of `read`. On an error return None, and add the error to `refusals` if it is new."""
        try:
            return read()
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            line = error_line(first_line(error))
            if line not in self.refusals:
                self.refusals.append(line)
            return None


def main(settings: InspectSettings) -> int:
    """Run `kvasir inspect`: print a checkpoint's contents and how it would be served. Return 1 if it would not be."""
    found = examine(settings)
    if settings.json_:
        print(json.dumps(as_json(settings.checkpoint, found), indent=2, ensure_ascii=False))
    else:
        for title, lines in _sections(settings, found).items():
            if rows := list(lines):
                width = max(len(name) for name, _ in rows)
                print(title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows), "", sep="\n")
    if found.refusals:
        print(f"kvasir inspect: a server would reject this: {found.refusals[0]}", file=sys.stderr)
    return 1 if found.refusals else 0


def examine(settings: InspectSettings) -> Findings:
    """Read all that a server reads before the weights; with --verify, all files. Errors become lines of `refusals`.

    Raises CheckpointError if the path is no checkpoint at all.
    """
    path = settings.checkpoint
    if not is_gguf(path) and not any(os.path.isfile(path / name) for name in (CONFIG_FILE, MANIFEST_FILE)):
        read_manifest(path)  # raises: no checkpoint
    found = Findings()
    found.manifest = manifest = found.attempt(lambda: read_manifest(path))
    found.tokenizer = tokenizer = found.attempt(lambda: load_tokenizer(path))
    if manifest is None:
        found.attempt(lambda: load_chat_template(path))
        return found
    found.warnings += manifest.config_warnings
    serving = ServeSettings(checkpoint=path)
    found.attempt(lambda: manifest.check_files(has_hashes=settings.verify))
    if tokenizer is not None:
        found.served = found.attempt(lambda: read_served_model(serving, manifest, tokenizer))
    if found.served is not None:
        found.warnings[:] = found.served.warnings()
    if found.attempt(lambda: manifest.placements) is not None:
        if tokenizer is not None:
            found.attempt(lambda: manifest.check_tokenizer(tokenizer))
        needs = ServerNeeds(standby=serving.standby, num_blocks=0)
        found.engine = found.attempt(lambda: forecast_engine(serving, manifest, server=needs))
    return found


def as_json(path: Path, found: Findings) -> dict[str, Any]:
    """Return the findings as JSON values. Parts that cannot be used are null."""
    manifest, tokenizer, served, engine = found.manifest, found.tokenizer, found.served, found.engine
    return {
        "path": str(path),
        "name": None if manifest is None else manifest.name,
        "family": None if manifest is None else _family(manifest),
        "num_parameters": None if manifest is None else manifest.config.num_parameters,
        "context_length": None if manifest is None else manifest.config.max_context_length,
        "stored": None if manifest is None else {"format": _stored(found), "num_bytes": manifest.num_weight_bytes},
        "config": None if manifest is None else manifest.config.to_dict(),
        "not_served": None if manifest is None else manifest.left_out or None,
        "tokenizer": None
        if tokenizer is None
        else {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "num_special_tokens": len(tokenizer.special_tokens),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
        },
        "chat": None if served is None else {"template": _template_name(served), **served.chat_format.describe()},
        "serving": None
        if engine is None
        else {
            "device": engine.facts.device,
            "attention": engine.facts.attention,
            "native_layers": manifest.config.num_layers if engine.facts.kernel_level and manifest is not None else 0,
            "kernel_level": engine.facts.kernel_level,
            "dtype": engine.facts.dtype,
            "matrices": engine.facts.matrices,
            "weight_bytes": engine.weight_bytes,
            "kv_cache_bytes_per_token": engine.cache_bytes_per_token,
            "kv_cache_bytes": engine.facts.kv_cache_bytes,
            "kv_cache_tokens": engine.facts.num_blocks * engine.facts.block_size,
            "streams": {str(length): count for length, count in _streams(engine).items()},
        },
        "warnings": found.warnings,
        "refusals": found.refusals,
    }


def _sections(settings: InspectSettings, found: Findings) -> dict[str, Rows]:
    """Return the rows of the listing by title. A section without rows is not shown."""
    manifest = found.manifest
    issues: dict[str, Rows] = {
        "ignored": (("", line) for line in found.warnings),
        "would be rejected": (("", line) for line in found.refusals),
    }
    if manifest is None:
        return {f"{settings.checkpoint}": iter(()), **issues}
    files = "files, not verified: no hashes known"
    if manifest.family is None:
        files = "files, all hashes correct" if settings.verify else "files; --verify compares the hashes"
    return {
        f"{manifest.name} ({manifest.directory})": _model_rows(found, manifest),
        "not served": (("", text) for text in [manifest.left_out] if text),
        "parameters": _parameter_rows(manifest.config),
        "served here": _serving_rows(found.engine, manifest),
        "memory": _memory_rows(manifest),
        "tokens": iter(()) if found.tokenizer is None else _token_rows(found, manifest, found.tokenizer),
        files: (
            (name, f"{size:>13,} bytes" + (f"  SHA-256 {digest[:16]}…" if digest else ""))
            for name, (size, digest) in manifest.files.items()
        ),
        "training": _training_rows(manifest.training),
        **issues,
    }


def _family(manifest: Manifest) -> str:
    return "kvasir" if manifest.family is None else manifest.family.model_type


def _stored(found: Findings) -> str | None:
    """Return the dtype of most weights in the files, such as BF16, or their quantization; None if not servable."""
    manifest = found.manifest
    if manifest is None or found.engine is None:
        return None
    return manifest.weight_dtype if manifest.quantization is None else manifest.quantization.text


def _model_rows(found: Findings, manifest: Manifest) -> Rows:
    yield "family", "Kvasir's own format" if manifest.family is None else _family(manifest)
    yield "stored", f"{_stored(found) or 'unknown'}, {_size(manifest.num_weight_bytes)}"
    yield from _config_rows(manifest.config)


def _streams(engine: EngineForecast) -> dict[int, int]:
    """Return how many sequences fit into the KV-cache at once, for some lengths of a sequence in tokens."""
    facts, longest = engine.facts, engine.facts.max_context_length
    lengths = [*(length for length in _STREAM_LENGTHS if length < longest), longest]
    return {length: facts.num_blocks // -(-length // facts.block_size) for length in lengths}


def _serving_rows(engine: EngineForecast | None, manifest: Manifest) -> Rows:
    """Yield the listing's rows about the engine that `kvasir serve` would build here; none if it would fail."""
    if engine is None:
        return
    facts, layers = engine.facts, manifest.config.num_layers
    native = f"all {layers} in native kernels ({facts.kernel_level})"
    yield "layers", native if facts.kernel_level else f"none of {layers} in native kernels; {facts.attention} attention"
    yield "numbers", f"{facts.dtype}, {facts.matrices} matrices, on {facts.device}"
    yield "weights", _size(engine.weight_bytes)
    tokens = facts.num_blocks * facts.block_size
    size = f"{_size(facts.kv_cache_bytes)} for {tokens:,} tokens"
    yield "KV-cache", f"{engine.cache_bytes_per_token:,} bytes per token; {size} in the memory that is free now"
    streams = ", ".join(f"{count:,} of {length:,} tokens" for length, count in _streams(engine).items())
    yield "streams that fit", streams


def _template_name(served: ServedModel) -> str | None:
    return None if served.template is None else Path(served.template.origin).name


def _config_rows(config: ModelConfig) -> Rows:
    """Yield the listing's rows about the config, without fields that are unset or of an unused mechanism."""
    uses = {
        "rope_theta": config.position is PositionKind.ROTARY,
        "norm_bias": config.norm is NormKind.LAYER_NORM,
        "norm_unit_offset": config.norm is NormKind.RMS_NORM,
        "qk_norm_scope": config.qk_norm,
    }
    for name, value in config.to_dict().items():
        if value is not None and value != [] and uses.get(name, True):
            yield name, _in_words(value) if isinstance(value, Mapping) else value


def _parameter_rows(config: ModelConfig) -> Rows:
    groups: Counter[str] = Counter()
    for part in parameter_counts.count_parameters(config):
        groups[part.group] += part.num_counted
    for group, number in groups.items():
        yield group, f"{number:>15,}  {number / config.num_parameters:6.1%}"
    yield "total", f"{config.num_parameters:>15,}"


def _memory_rows(manifest: Manifest) -> Rows:
    config = manifest.config
    if manifest.quantization is not None:
        yield "stored", f"weights {_size(manifest.num_weight_bytes)}, served on a CPU as {manifest.quantization.text}"
    for dtype, size in parameter_counts.DTYPE_BYTES.items():
        kv_cache = parameter_counts.kv_cache_formula(config, size)
        yield (
            dtype,
            f"weights {_size(config.num_parameters * size)}, KV-cache {kv_cache.text} = {kv_cache.value:,} bytes "
            f"per token, {_size(kv_cache.value * config.max_context_length)} per full context",
        )
    kv_bytes = config.kv_bytes_per_token(1)
    context = _size(kv_bytes * config.max_context_length)
    yield "int8", f"KV-cache with float32 scales {kv_bytes:,} bytes per token, {context} per full context"


def _token_rows(found: Findings, manifest: Manifest, tokenizer: Tokenizer) -> Rows:
    """Yield the listing's rows about vocabulary, begin and end tokens, sampling defaults and chat template."""

    def named(ids: Sequence[int]) -> str:
        return ", ".join(f"{token_id} {tokenizer.format_token_name(token_id)!r}" for token_id in ids) if ids else "none"

    special = f"{tokenizer.vocab_size:,}, including {len(tokenizer.special_tokens)} special tokens"
    yield "tokenizer", f"{tokenizer.kind}, vocabulary {special}"
    yield "begin-of-text token", named([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])
    yield "end-of-text tokens", named(tokenizer.eos_token_ids)
    if (wanted := found.attempt(lambda: read_generation_config(manifest.directory))) is not None:
        known = dataclasses.asdict(wanted).items()
        other = ("ignored", "eos_token_ids", "bos_token_id", "pad_token_id")
        defaults = ", ".join(f"{name} {value}" for name, value in known if value is not None and name not in other)
        yield "generation defaults", defaults or "not set"
        if wanted.ignored:
            yield "ignored defaults", ", ".join(wanted.ignored)
    template = found.attempt(lambda: load_chat_template(manifest.directory))
    origin = "" if template is None else f"{len(template.source):,} characters, from {Path(template.origin).name}"
    yield "chat template", origin or "not set"
    if template is not None and found.served is not None:
        for name, value in found.served.chat_format.describe().items():
            yield name.replace("_", " "), value


def _training_rows(training: Mapping[str, Any]) -> Rows:
    """Yield the work of all runs together, the fields of the last run, and one row for each run before it."""
    runs = [training]
    while isinstance(before := runs[-1].get("started_from"), Mapping):
        runs.append(before)
    if len(runs) > 1:
        tokens, seconds = (sum(run.get(name) or 0 for run in runs) for name in ("tokens", "seconds"))
        yield "all runs", f"{len(runs)}, with {tokens:,} tokens and {seconds / 3600:.1f} hours of steps; the last one:"
    yield from _flat({name: value for name, value in training.items() if name != "started_from" or len(runs) == 1})
    for run in runs[1:]:
        facts = {name: value for name, value in run.items() if not isinstance(value, Mapping | list)}
        yield ("started_from" if run is runs[1] else "  before it"), _in_words(facts)


def _flat(values: Mapping[str, Any]) -> Rows:
    """Yield one row per field of the training record, but one row per item of a field that is a list of mappings."""
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
    """Format a value of the training record. Hashes, floats and long lists are shortened."""
    if isinstance(value, Mapping):
        return f"({_in_words(value)})"
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return ", ".join(map(_short, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} numbers" if len(value) > 8 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    text = str(value)
    return f"{text[:16]}…" if len(text) == 64 and " " not in text else text


def _size(num_bytes: int) -> str:
    """Format a size in MiB, or in KiB below 1 MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"
