"""Commands that read a checkpoint without torch: inspect params, tokenize and export-tokenizer."""

import sys
from collections.abc import Iterator

from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.inspect import parameter_counts
from model.io.files import CheckpointError
from model.tokenizer.export import export_tokenizer as write_tokenizer
from model.tokenizer.files import load_tokenizer
from service.config.settings import ExportTokenizerSettings, InspectParamsSettings, TokenizeSettings
from service.protocol.logprobs import format_token_name

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
    "D": "dimension of a key or value in global layers",
    "M": "width of the MLP in layers without keys",
    "p": "size of a layer's own input",
}


def tokenize(settings: TokenizeSettings) -> int:
    """Run `kvasir tokenize`: print the tokens of `--text` or standard input."""
    try:
        tokenizer = load_tokenizer(read_manifest(settings.checkpoint).directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{'' if settings.text else '; give a text with --text'}") from None
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
    widest, names = max(len(row.formula.text) for row in rows), max(17, *(len(row.name) for row in rows))
    head = f"  {'':<{widest}}  {'one':>13}  {'places':>6}  {'by formula':>14}  {'counted':>14}  {'share':>6}  check"
    yield f"{'parameters':<{names + 11}}{head}"
    group = ""
    for row in rows:
        # A part without parameters has a note with the reason instead of a formula.
        formula = row.formula.text if row.note == "" else ""
        cells = f"{row.formula.value:>13,}  {row.num_places:>6}  {row.by_formula:>14,}  {row.num_counted:>14,}"
        share = f"{row.num_counted / config.num_parameters:6.1%}"
        result = f"{'equal' if row.agrees else 'DIFFERS'}  {row.note}".rstrip()
        title, group = "" if row.group == group else row.group, row.group
        yield f"  {title:<9}  {row.name:<{names}}  {formula:<{widest}}  {cells}  {share}  {result}"
    totals = formulas, counted = sum(row.by_formula for row in rows), sum(row.num_counted for row in rows)
    numbers = "  ".join(f"{total:>14,}" for total in totals)
    equal = "equal" if formulas == counted == config.num_parameters else "DIFFERS"
    yield f"  {'total':<{names + 11}}  {'':<{widest}}  {'':>13}  {'':>6}  {numbers}  {1:6.1%}  {equal}"


def _attention(config: ModelConfig) -> Iterator[str]:
    formulas = parameter_counts.attention_formulas(config)
    names, texts = max(len(name) for name, _ in formulas), max(len(formula.text) for _, formula in formulas)
    yield "attention of one layer, without biases and norms"
    for name, formula in formulas:
        yield f"  {name:<{names}}  {formula.text:<{texts}}  {formula.value:>13,}"


def _kv_cache(config: ModelConfig) -> Iterator[str]:
    yield "KV-cache"
    for dtype, size in parameter_counts.DTYPE_BYTES.items():
        formula, counted = parameter_counts.kv_cache_formula(config, size), config.kv_bytes_per_token(size)
        check = "equal" if formula.value == counted else "DIFFERS"
        context = counted * config.max_context_length / 2**20
        yield (
            f"  {dtype:<8}  {formula.text} = {formula.value:,} bytes per token, counted {counted:,}: {check}; "
            f"{context:,.1f} MiB for a context of {config.max_context_length:,}"
        )
    multi_head = 2 * config.num_heads * 4 * sum(map(config.head_dim_of, range(config.num_layers)))
    if (kept := config.kv_bytes_per_token(4)) < multi_head:
        yield f"  {kept / multi_head:.1%} of what multi-head attention with {config.num_heads} heads would store"
