"""Command `kvasir inspect params`: print parameter counts by closed formula and by tensor."""

import sys
from collections.abc import Iterator

from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.inspect.parameter_counts import (
    Letters,
    PartCount,
    attention_formulas,
    attention_name,
    count_parameters,
    kv_cache_formula,
)
from service.config.settings import InspectParamsSettings

_MEANINGS = {
    "V": "vocabulary",
    "n": "longest context",
    "L": "layers",
    "d": "width",
    "h": "query heads",
    "g": "key/value heads",
    "d_k": "dimension of a query or key",
    "d_v": "dimension of a value",
    "m": "width of the MLP",
    "b": "number of distance buckets",
    "r": "largest distinct distance",
}
_DTYPES = {"float32": 4, "bfloat16": 2}


def main(settings: InspectParamsSettings) -> int:
    """Print the tables. Exit code 1 if a formula and the tensors disagree: a bug, or a config of a later version."""
    manifest = read_manifest(settings.checkpoint)
    config, rows = manifest.config, count_parameters(manifest.config)
    print(f"{manifest.name}: {config.num_parameters:,} parameters, {attention_name(config)} attention\n")
    for lines in (_letters(config), _table(rows, config), _attention(config), _kv_cache(config)):
        print(*lines, "", sep="\n")
    wrong = [row for row in rows if not row.agrees]
    for row in wrong:
        differs = f"formula {row.formula.text} gives {row.by_formula:,}, but the tensors have {row.num_counted:,}"
        print(f"kvasir inspect params: {row.group} {row.name}: {differs}", file=sys.stderr)
    return 1 if wrong or sum(row.num_counted for row in rows) != config.num_parameters else 0


def _letters(config: ModelConfig) -> Iterator[str]:
    at = Letters(config)
    yield "letters"
    for name, meaning in _MEANINGS.items():
        if (value := getattr(at, name).value) > 0:
            yield f"  {name:<4} {value:>9,}  {meaning}"


def _table(rows: list[PartCount], config: ModelConfig) -> Iterator[str]:
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
    formulas = attention_formulas(config)
    names, texts = max(len(name) for name, _ in formulas), max(len(formula.text) for _, formula in formulas)
    yield "attention of one layer, without biases and norms"
    for name, formula in formulas:
        yield f"  {name:<{names}}  {formula.text:<{texts}}  {formula.value:>13,}"


def _kv_cache(config: ModelConfig) -> Iterator[str]:
    yield "KV-cache"
    for dtype, size in _DTYPES.items():
        formula, counted = kv_cache_formula(config, size), config.kv_bytes_per_token(size)
        check = "equal" if formula.value == counted else "DIFFERS"
        context = counted * config.max_context_length / 2**20
        yield (
            f"  {dtype:<8}  {formula.text} = {formula.value:,} bytes per token, counted {counted:,}: {check}; "
            f"{context:,.1f} MB for a context of {config.max_context_length:,}"
        )
    multi_head = 2 * config.num_layers * config.num_heads * config.head_dim * _DTYPES["float32"]
    if (kept := config.kv_bytes_per_token(_DTYPES["float32"])) < multi_head:
        yield f"  {kept / multi_head:.1%} of what multi-head attention with {config.num_heads} heads would store"
