"""Commands that read a checkpoint without torch: inspect, inspect params, tokenize and export-tokenizer."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.chat.template import load_chat_template
from model.checkpoint.manifest import Manifest, read_manifest
from model.config import ModelConfig
from model.config_enums import NormKind, PositionKind
from model.inspect import parameter_counts
from model.tokenizer.export import export_tokenizer as write_tokenizer
from model.tokenizer.files import load_tokenizer
from model.tokenizer.generation_config import read_generation_config
from model.tokenizer.interface import Tokenizer
from service.config.settings import ExportTokenizerSettings, InspectParamsSettings, InspectSettings, TokenizeSettings
from service.protocol.logprobs import format_token_name

Rows = Iterator[tuple[str, object]]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Letters of the formulas of `model.inspect.parameter_counts`.
_LETTERS = {
    "V": "vocabulary",
    "n": "longest context",
    "L": "layers",
    "d": "width",
    "h": "query heads",
    "g": "key/value heads",
    "d_k": "dimension of a query or key",
    "d_v": "dimension of a value",
    "m": "width of the MLP",
    "e": "experts of a layer",
    "f": "width of an expert",
    "b": "number of distance buckets",
    "r": "largest distinct distance",
}


def tokenize(settings: TokenizeSettings) -> int:
    """Run `kvasir tokenize`: print the tokens of `--text` or standard input."""
    tokenizer = load_tokenizer(read_manifest(settings.checkpoint).directory)
    begin = [] if settings.no_begin or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    text = sys.stdin.buffer.read().decode() if settings.text is None else settings.text
    token_ids = [*begin, *tokenizer.encode(text)]
    if settings.ids_only:
        print(*token_ids)
        return 0
    for token_id in token_ids:
        name = format_token_name(tokenizer, token_id)
        print(f"{token_id:>8}  {name if name.startswith('bytes:') else repr(name)}")
    size, num_text = len(text.encode("utf-8", "surrogateescape")), len(token_ids) - len(begin)
    words, note = "token" if len(token_ids) == 1 else "tokens", " (1 is begin-of-text)" if begin else ""
    print(f"{len(token_ids)} {words}{note}, {size} bytes, {size / max(1, num_text):.2f} bytes per token of text")
    return 0


def export_tokenizer(settings: ExportTokenizerSettings) -> int:
    """Run `kvasir export-tokenizer`: write the checkpoint's tokenizer to `--out`."""
    directory = read_manifest(settings.checkpoint).directory
    print(*write_tokenizer(load_tokenizer(directory), directory, settings.out), sep="\n")
    return 0


def main(settings: InspectSettings) -> int:
    """Run `kvasir inspect`: print config, memory, tokens, files and training of a checkpoint."""
    manifest = read_manifest(settings.checkpoint)
    tokenizer = manifest.verify()
    files = "files, all hashes correct" if manifest.family is None else "files, not verified: no hashes known"
    sections: dict[str, Rows] = {
        f"{manifest.name} ({manifest.directory})": _choices(manifest.config),
        "not served": (("", text) for text in [manifest.left_out] if text),
        "parameters": _parameter_rows(manifest.config),
        "memory": _memory_rows(manifest),
        "tokens": _token_rows(manifest, tokenizer),
        files: (
            (name, f"{size:>13,} bytes" + (f"  SHA-256 {digest[:16]}…" if digest else ""))
            for name, (size, digest) in manifest.files.items()
        ),
        "training": _flat(manifest.training),
    }
    for title, lines in sections.items():
        if rows := list(lines):
            width = max(len(name) for name, _ in rows)
            print(title, *(f"  {name:<{width}}  {value}" for name, value in rows), "", sep="\n")
    return 0


def _choices(config: ModelConfig) -> Rows:
    """Yield the config fields that affect this model. Fields that are unset or of an unused mechanism are left out."""
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
    for dtype, size in _DTYPE_BYTES.items():
        kv_cache = parameter_counts.kv_cache_formula(config, size)
        yield (
            dtype,
            f"weights {_size(config.num_parameters * size)}, KV-cache {kv_cache.text} = {kv_cache.value:,} bytes "
            f"per token, {_size(kv_cache.value * config.max_context_length)} per full context",
        )
    kv_bytes = config.kv_bytes_per_token(1)
    context = _size(kv_bytes * config.max_context_length)
    yield "int8", f"KV-cache with float32 scales {kv_bytes:,} bytes per token, {context} per full context"


def _token_rows(manifest: Manifest, tokenizer: Tokenizer) -> Rows:
    """Yield rows on vocabulary, begin and end tokens, sampling defaults and chat template of the checkpoint."""
    wanted = read_generation_config(manifest.directory)

    def named(ids: Sequence[int]) -> str:
        return ", ".join(f"{token_id} {tokenizer.format_token_name(token_id)!r}" for token_id in ids) if ids else "none"

    yield "vocabulary", f"{tokenizer.vocab_size:,}, including {len(tokenizer.special_tokens)} special tokens"
    yield "begin-of-text token", named([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])
    yield "end-of-text tokens", named(tokenizer.eos_token_ids)
    known = dataclasses.asdict(wanted).items()
    other = ("ignored", "eos_token_ids", "bos_token_id", "pad_token_id")
    defaults = ", ".join(f"{name} {value}" for name, value in known if value is not None and name not in other)
    yield "generation defaults", defaults or "not set"
    if wanted.ignored:
        yield "ignored defaults", ", ".join(wanted.ignored)
    template = load_chat_template(manifest.directory)
    origin = "" if template is None else f"{len(template.source):,} characters, from {Path(template.origin).name}"
    yield "chat template", origin or "not set"


def _flat(values: Mapping[str, Any]) -> Rows:
    """Yield a row per field of the training record. A mapping becomes one row, a list of mappings one row each."""
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
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} numbers" if len(value) > 8 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    text = str(value)
    return f"{text[:16]}…" if len(text) == 64 and " " not in text else text


def _size(num_bytes: int) -> str:
    """Format a size in MiB, or in KiB below 1 MiB."""
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def inspect_params(settings: InspectParamsSettings) -> int:
    """Run `kvasir inspect params`: count parameters by formula and in the tensors. Return 1 if the counts differ."""
    manifest = read_manifest(settings.checkpoint)
    config, rows = manifest.config, parameter_counts.count_parameters(manifest.config)
    attention = parameter_counts.attention_name(config)
    print(f"{manifest.name}: {config.num_parameters:,} parameters, {attention} attention\n")
    values = {name: getattr(parameter_counts.Letters(config), name).value for name in _LETTERS}
    letters = (
        "letters",
        *(f"  {name:<4} {value:>9,}  {_LETTERS[name]}" for name, value in values.items() if value > 0),
    )
    for lines in (letters, _table(rows, config), _attention(config), _kv_cache(config)):
        print(*lines, "", sep="\n")
    wrong = [row for row in rows if not row.agrees]
    for row in wrong:
        print(
            f"kvasir inspect params: {row.group} {row.name}: formula {row.formula.text} gives {row.by_formula:,} "
            f"parameters, but the tensors have {row.num_counted:,}",
            file=sys.stderr,
        )
    return 1 if wrong or sum(row.num_counted for row in rows) != config.num_parameters else 0


def _table(rows: list[parameter_counts.PartCount], config: ModelConfig) -> Iterator[str]:
    widest = max(len(row.formula.text) for row in rows)
    head = f"  {'':<{widest}}  {'one':>13}  {'places':>6}  {'by formula':>14}  {'counted':>14}  {'share':>6}  check"
    yield f"{'parameters':<28}{head}"
    group = ""
    for row in rows:
        # A part without parameters has a note with the reason instead of a formula.
        formula = row.formula.text if row.note == "" else ""
        cells = f"{row.formula.value:>13,}  {row.num_places:>6}  {row.by_formula:>14,}  {row.num_counted:>14,}"
        share = f"{row.num_counted / config.num_parameters:6.1%}"
        result = f"{'equal' if row.agrees else 'DIFFERS'}  {row.note}".rstrip()
        title, group = "" if row.group == group else row.group, row.group
        yield f"  {title:<9}  {row.name:<17}  {formula:<{widest}}  {cells}  {share}  {result}"
    formulas, counted = sum(row.by_formula for row in rows), sum(row.num_counted for row in rows)
    equal = "equal" if formulas == counted == config.num_parameters else "DIFFERS"
    yield f"  {'total':<28}  {'':<{widest}}  {'':>13}  {'':>6}  {formulas:>14,}  {counted:>14,}  {1:6.1%}  {equal}"


def _attention(config: ModelConfig) -> Iterator[str]:
    formulas = parameter_counts.attention_formulas(config)
    names, texts = max(len(name) for name, _ in formulas), max(len(formula.text) for _, formula in formulas)
    yield "attention of one layer, without biases and norms"
    for name, formula in formulas:
        yield f"  {name:<{names}}  {formula.text:<{texts}}  {formula.value:>13,}"


def _kv_cache(config: ModelConfig) -> Iterator[str]:
    yield "KV-cache"
    for dtype, size in _DTYPE_BYTES.items():
        formula, counted = parameter_counts.kv_cache_formula(config, size), config.kv_bytes_per_token(size)
        check = "equal" if formula.value == counted else "DIFFERS"
        context = counted * config.max_context_length / 2**20
        yield (
            f"  {dtype:<8}  {formula.text} = {formula.value:,} bytes per token, counted {counted:,}: {check}; "
            f"{context:,.1f} MiB for a context of {config.max_context_length:,}"
        )
    multi_head = 2 * config.num_layers * config.num_heads * config.head_dim * 4
    if (kept := config.kv_bytes_per_token(4)) < multi_head:
        yield f"  {kept / multi_head:.1%} of what multi-head attention with {config.num_heads} heads would store"
