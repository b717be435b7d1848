"""Command `kvasir eval`: measure the quality of a checkpoint, and report the results as tables and files."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from model.attention.backends import ATTENTION_BACKENDS, RoundedAttention
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import Manifest, read_manifest
from model.config import ModelConfig
from model.evaluation.evaluation import Evaluation, evaluate_checkpoint
from model.evaluation.harness import PAIRS_NAME, export_tasks
from model.evaluation.likelihood import rolling_log_likelihoods
from model.evaluation.minimal_pairs import accuracy, by_group, read_pairs, shipped_pairs
from model.evaluation.prompts import Sampler
from model.gpu.quantization import Quantization
from model.io.files import file_digest
from model.nn.transformer import Transformer
from model.system.limits import usable_cpus
from model.tokenizer.interface import Tokenizer
from model.training.config import SourceConfig, load_train_config
from model.training.corpus import check_sources, read_source
from service.config.settings import SettingsError
from service.config.training_settings import EvalSettings
from service.engine.engine import complete_batch
from service.worker.devices import find_device
from service.worker.engine_factory import (
    check_quantize,
    find_cache_dtype,
    find_quantization,
    prepare_matrices,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_USUAL_CONTEXT = 2048


def main(settings: EvalSettings) -> int:
    """Run `kvasir eval`: evaluate the checkpoint, print the results and write the requested files."""
    has_suite = settings.suite == "shipped"
    if not (settings.config or settings.texts or settings.pairs or settings.samples or has_suite):
        raise SettingsError("nothing to measure: give --config, --texts, --pairs or --suite, or set --samples above 0")
    _find_quantization(settings)
    manifest = read_manifest(settings.checkpoint)
    check_quantize(settings.quantize, manifest)
    length = _context_length(settings, manifest.config)
    manifest = dataclasses.replace(manifest, config=manifest.config.for_context(length))
    splits = _read_splits(settings)
    pairs = read_pairs(settings.pairs) if settings.pairs else shipped_pairs() if has_suite else []
    tokenizer = manifest.verify()
    if settings.export_tasks is not None:
        tasks = export_tasks(settings.export_tasks, splits, pairs)
        model_args = f"model={manifest.name},base_url=http://127.0.0.1:8000/v1/completions,max_length={length}"
        _print_progress(
            f"tasks written to {settings.export_tasks}; to run them, serve the checkpoint on port 8000 and run:\n"
            f"lm_eval --model local-completions --model_args {model_args} --include_path {settings.export_tasks} "
            f"--tasks {','.join(tasks)}"
        )
    plain = _evaluate_unquantized(settings, manifest, tokenizer, splits, length)
    model = _load(settings, manifest)
    sampler = None
    if settings.samples:
        sampler = Sampler(model, tokenizer, manifest.directory, complete_batch, draws=settings.samples)
    evaluation = evaluate_checkpoint(
        model,
        tokenizer,
        splits=splits,
        pairs=pairs,
        sampler=sampler,
        max_context_length=length,
        has_cloze=has_suite,
        report=_print_progress,
    )
    _print(manifest, evaluation, plain)
    # msgspec writes NaN and infinity, as from a model with damaged weights, as null.
    if settings.out is not None:
        known = manifest.files.items()
        checkpoint = {
            "name": manifest.name,
            "parameters": manifest.config.num_parameters,
            "files": {name: digest or file_digest(manifest.path_of(name)) for name, (_, digest) in known},
            "training": manifest.training,
        }
        used = ("dtype", "quantize", "kv_cache_dtype", "max_documents", "samples")
        facts = {name: getattr(settings, name) for name in used} | {"max_context_length": length}
        facts["device"] = model.token_embedding.weight.device.type
        result = {"checkpoint": checkpoint, "settings": facts, **evaluation.to_dict()}
        if plain is not None:
            result["without_rounding"] = plain.to_dict()["held_out"]
        _write(settings.out, msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if settings.documents is not None:
        _print_progress("computing the rolling log-likelihood of each document, as lm-evaluation-harness does")
        rows = _documents(evaluation, splits, model, tokenizer, length)
        _write(settings.documents, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return 0


def _context_length(settings: EvalSettings, config: ModelConfig) -> int:
    """Return the number of tokens of an evaluation window. lm-evaluation-harness needs at least 3.

    Raises SettingsError if --max-context-length is under 3, or over the maximum of the model.
    """
    wanted, available = settings.max_context_length, config.max_context_length
    if wanted == "auto":
        return min(available, _USUAL_CONTEXT)
    if not 3 <= wanted <= available:
        raise SettingsError(
            f"--max-context-length {wanted}: must be from 3 to {available}, the number of positions of the model"
        )
    return wanted


def _read_splits(settings: EvalSettings) -> dict[str, list[str]]:
    """Return the documents to evaluate, by source: held-out documents of the recipe, and the files of `--texts`.

    Each has at most --max-documents, evenly spaced. Sources without documents are left out. Raises SettingsError for
    equal names, and if there are no documents although a recipe is given.
    """
    recipe = () if settings.config is None else load_train_config(settings.config).sources
    sources = [source for source in recipe if source.held_out or source.held_out_ids]
    for text in settings.texts:
        name, _, path = text.partition("=")
        if any(source.name == name for source in sources):
            raise SettingsError(
                f"--texts {text}: the name {name} is already used by another text or by a source of the recipe; "
                "choose another name"
            )
        sources.append(SourceConfig(name=name, path=Path(path), repeats=0, held_out=1.0, licence=""))
    check_sources(sources)
    splits = {source.name: read_source(source).held_out for source in sources}
    splits = {name: texts for name, texts in splits.items() if texts}
    if (most := settings.max_documents) is not None:
        for name, texts in splits.items():
            count = min(most, len(texts))
            splits[name] = [texts[number * len(texts) // count] for number in range(count)]  # evenly spaced
    if settings.config is not None and not splits:
        raise SettingsError(f"--config {settings.config}: no source of the recipe holds out documents; give --texts")
    return splits


def _load(settings: EvalSettings, manifest: Manifest) -> Transformer:
    torch.set_num_threads(usable_cpus() if settings.threads == "auto" else settings.threads)
    device, dtype = find_device(settings.device), _DTYPES[settings.dtype]
    quantization, cache_dtype = _find_quantization(settings)
    attention = RoundedAttention(ATTENTION_BACKENDS["sdpa"], cache_dtype)
    model = load_model(manifest, device=device, dtype=dtype, attention=attention)
    if settings.quantize != "none":
        prepare_matrices(model, settings.quantize, quantization)
    return model


def _evaluate_unquantized(
    settings: EvalSettings, manifest: Manifest, tokenizer: Tokenizer, splits: Mapping[str, Sequence[str]], length: int
) -> Evaluation | None:
    """Evaluate the texts with the unquantized model, for comparison; None without texts or without quantization."""
    if not splits or (settings.quantize, settings.kv_cache_dtype) == ("none", "auto"):
        return None
    model = _load(settings.model_copy(update={"quantize": "none", "kv_cache_dtype": "auto"}), manifest)
    _print_progress("measuring the texts without quantization, for comparison")
    return evaluate_checkpoint(model, tokenizer, splits=splits, max_context_length=length, report=_print_progress)


def _find_quantization(settings: EvalSettings) -> tuple[Quantization | None, torch.dtype]:
    """Return the GPU quantization of the weights (None on a CPU, or without one), and the dtype of the KV-cache.

    Raises SettingsError if the device or the dtype of the model does not support them.
    """
    device, dtype = find_device(settings.device), _DTYPES[settings.dtype]
    cache_dtype = find_cache_dtype(settings.kv_cache_dtype, device, dtype)
    return find_quantization(settings.quantize, device, dtype), cache_dtype


def _print(manifest: Manifest, evaluation: Evaluation, plain: Evaluation | None) -> None:
    """Print the tables of an evaluation. `plain`: evaluation of the unquantized model, to show the change, or None."""
    quantized = "" if manifest.quantization is None else f", {manifest.quantization.text}"
    title = f"{manifest.name}, {manifest.config.num_parameters:,} parameters{quantized}"
    rows = []
    for name, held_out in evaluation.held_out.items():
        counts = f"{len(held_out.documents):,}", f"{held_out.total.num_tokens:,}"
        losses = f"{held_out.bits_per_byte:.4f}", f"{held_out.nats_per_token:.4f}"
        before = None if plain is None else plain.held_out[name].bits_per_byte
        effect = [f"{held_out.bits_per_byte / before - 1:+.2%}" if before else "–"] if plain else []
        rows.append((name, *counts, *losses, f"{held_out.accuracy:.2%}", *effect))
    change = () if plain is None else ("change by quantization",)
    _print_table(title, ("texts", "documents", "tokens", "bits/byte", "nats/token", "top-1", *change), rows)
    rows = [(name, f"{num:,}", f"{share:.2%}") for name, (num, share) in evaluation.cloze.items()]
    _print_table(title, ("last word among five", "documents", "accuracy"), rows)
    if evaluation.pairs:
        groups = [(name, scores) for name, scores in by_group(evaluation.pairs).items() if name]
        rows = [
            (name, f"{len(scores):,}", f"{accuracy(scores):.2%}")
            for name, scores in (*groups, ("all", evaluation.pairs))
        ]
        _print_table(title, ("minimal pairs", "pairs", "accuracy"), rows)
    rows = []
    for measured in evaluation.diversity:
        shares = ("–" if share is None else f"{share:.3f}" for share in (*measured.distinct, measured.repetition))
        rows.append((f"{measured.temperature}", f"{measured.num_samples:,}", *shares))
    _print_table(title, ("temperature", "samples", "distinct-1", "distinct-2", "distinct-3", "repetition"), rows)
    if evaluation.looping_share is not None:
        print(f"greedy completions that loop: {evaluation.looping_share:.1%}")
    for sample in evaluation.samples:
        gap = " →\n" if sample.kind == "chat" else ""
        print(f"\n[{sample.kind}] {sample.prompt}{gap}{sample.completion}")


def _print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        table = Table(headings[0], title=title)
        for heading in headings[1:]:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        Console(markup=False).print(table)  # names of splits and pairs come from files and may contain markup


def _documents(
    evaluation: Evaluation, splits: Mapping[str, Sequence[str]], model: Transformer, tokenizer: Tokenizer, length: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of --documents: log-likelihoods, in nats, of each document and of both sentences of each pair."""
    for name, held_out in evaluation.held_out.items():
        rolling = rolling_log_likelihoods(model, tokenizer, splits[name], max_length=length)
        for number, (ours, theirs) in enumerate(zip(held_out.documents, rolling, strict=True)):
            yield {
                "split": name,
                "index": number,
                "log_likelihood": ours.log_likelihood,
                "loglikelihood_rolling": theirs,
            }
    for number, score in enumerate(evaluation.pairs):
        yield {"split": PAIRS_NAME, "index": number, "good": score.good, "bad": score.bad}


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another file") from error
    _print_progress(f"wrote {path}")


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
